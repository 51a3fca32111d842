"""A Ray cluster of several nodes: where groups go, and what happens when a node dies, has another version, or lacks
room."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.bench.setup.ray_nodes import RayNode, RayNodes
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving, kill

pytestmark = pytest.mark.ray

_FLAGS = ["--groups", "2", "--tp", "2", "--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    """A head with one logical CPU."""
    with RayNodes(tmp_path, head_cpus=1) as nodes:
        yield nodes


def node_of(nodes: list[RayNode], pid: int) -> int:
    """The node that a process runs on."""
    return next(number for number, node in enumerate(nodes) if pid in node.processes())


def supervisor_of(node: RayNode) -> int:
    """The process id of the supervisor on this node; 0 if it runs elsewhere."""
    return next((pid for pid, command in node.processes().items() if command.startswith("ray::Supervisor")), 0)


@pytest.mark.full  # a minute on two cores, most of it a dozen processes that import Ray and torch
def test_groups_and_routers_follow_the_nodes(nodes: RayNodes, tiny_model: Path) -> None:
    """One group is packed, one is spread, each node has a router, and the supervisor is at the head. When a node dies,
    its group and its router are lost and the other group serves on, also after a restart of the supervisor. A new node
    brings both back."""
    command = [str(tiny_model), *_FLAGS, "--ray-address", nodes.address, "--router-per-node"]
    whole, half = nodes.add(2), nodes.add(1)
    until(lambda: nodes.count() == 3, "all nodes have joined")
    with Serving(*command, environment=nodes.environment) as serving:
        serving.wait_ready()
        routers = [serving.address, *(serving.wait_line("another router at ").split()[-1] for _ in range(2))]
        assert len(set(routers)) == 3
        hosts = {
            group["name"]: sorted(node_of([nodes.head, half, whole], rank["pid"]) for rank in group["ranks"])
            for group in serving.status()["groups"]
        }
        assert sorted(hosts.values()) == [[0, 1], [2, 2]]
        spread, packed = sorted(hosts, key=hosts.__getitem__)
        nodes.kill(half)
        serving.wait_line(f"{spread} is lost")
        serving.address = next(address for address in routers if answers(address))
        until(lambda: "waits for nodes" in serving.group(spread).get("reason", ""), f"{spread} says what it lacks")
        first = supervisor_of(nodes.head)
        kill(first)
        until(lambda: supervisor_of(nodes.head) not in (0, first), "there is another supervisor")
        assert serving.generate("def main", max_tokens=4).usage.completion_tokens == 4
        nodes.add(1)
        serving.wait_line(f"{spread} is serving")
        until(lambda: serving.group(spread).get("state") == "serving", "its router knows")
        assert serving.group(packed)["restarts"] == 0
        assert serving.generate("def main", max_tokens=4).usage.completion_tokens == 4


def answers(router: str) -> bool:
    """Whether a router answers at this address."""
    return coatcheck("status", "--address", router, "--json").returncode == 0


def test_what_cannot_serve_is_refused(nodes: RayNodes, tiny_model: Path) -> None:
    """A cluster without enough room is refused with what is missing and what is free. A cluster, or a node, with
    another version of Ray or Python is refused at once with both versions."""
    small = coatcheck("serve", str(tiny_model), *_FLAGS, "--ray-address", nodes.address, environment=nodes.environment)
    assert small.returncode == 2
    assert re.search(r"has 1 free on 1 node \(1 on .*\): 3 missing; .* or add nodes", small.stderr)
    nodes.pretend({"ray_version": "2.9.0", "python_version": "3.9.1"})
    done = coatcheck("serve", str(tiny_model), *_FLAGS, "--ray-address", nodes.address, environment=nodes.environment)
    assert done.returncode == 2 and "2.9.0" in done.stderr and "3.9.1" in done.stderr
    assert "the same versions of Ray and Python on every node" in done.stderr
    late = nodes.add(1, wait=False)
    until(lambda: not late.runs(), "the node of another version ends")
    assert "ersion mismatch" in late.log_tail()
    nodes.nodes.remove(late)
