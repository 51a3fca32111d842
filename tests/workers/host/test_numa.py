"""The NUMA node of each rank: pure decisions over recorded topologies, and the binding of a process."""

import os
from pathlib import Path

import pytest

from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.host import numa
from coatcheck.workers.host.numa import NumaBinding, bind_rank, choose_binding, parse_cpu_list, read_nodes

# /sys/devices/system/node/node*/cpulist of hosts, by node number.
LAPTOP = {0: "0-7"}
TWO_SOCKETS = {0: "0-31,64-95", 1: "32-63,96-127"}  # two Xeons of 32 cores, with hyper-threading
FOUR_PER_SOCKET = {node: f"{16 * node}-{16 * node + 15}" for node in range(8)}  # two EPYCs with NPS4
WITH_CXL = {0: "0-23", 1: "24-47", 2: ""}  # node 2 is memory alone


def write_nodes(folder: Path, cpu_lists: dict[int, str]) -> Path:
    """A folder like /sys/devices/system/node."""
    for number, cpu_list in cpu_lists.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cpu_list}\n")
    (folder / "online").write_text("0\n")
    return folder


def chosen(folder: Path, cpu_lists: dict[int, str], ranks: int, allowed: range = range(1024)) -> list[int | None]:
    """The node of each of `ranks` ranks on a host."""
    nodes = read_nodes(write_nodes(folder, cpu_lists), allowed)
    bindings = [choose_binding(nodes, rank, ranks) for rank in range(ranks)]
    return [binding.node.number if binding.node else None for binding in bindings]


@pytest.mark.parametrize(
    ("host", "ranks", "nodes"),
    [
        (LAPTOP, 2, [None, None]),
        (TWO_SOCKETS, 1, [None]),
        (TWO_SOCKETS, 2, [0, 1]),
        (TWO_SOCKETS, 3, [0, 0, 1]),
        (TWO_SOCKETS, 4, [0, 0, 1, 1]),
        (FOUR_PER_SOCKET, 4, [None] * 4),
        (FOUR_PER_SOCKET, 8, list(range(8))),
        (WITH_CXL, 2, [0, 1]),
        ({}, 2, [None, None]),
    ],
)
def test_one_rank_per_node(tmp_path: Path, host: dict[int, str], ranks: int, nodes: list[int | None]) -> None:
    """With at least as many ranks as nodes each rank has one node, in order; with fewer none is bound."""
    assert chosen(tmp_path, host, ranks) == nodes


def test_cores_that_are_not_allowed_do_not_count(tmp_path: Path) -> None:
    """A container with the cores of one node has one node, and its ranks are not bound."""
    assert chosen(tmp_path, TWO_SOCKETS, 2, allowed=range(32, 64)) == [None, None]


@pytest.mark.parametrize("host", [TWO_SOCKETS, FOUR_PER_SOCKET, WITH_CXL])
@pytest.mark.parametrize("ranks", range(8, 20))
def test_no_node_is_idle_or_overfull(tmp_path: Path, host: dict[int, str], ranks: int) -> None:
    """Every node has ranks, and no node has two more than another. `sharing_ranks` is their number."""
    nodes = read_nodes(write_nodes(tmp_path, host), range(1024))
    bindings = [choose_binding(nodes, rank, ranks) for rank in range(ranks)]
    counts = [sum(binding.node == node for binding in bindings) for node in nodes]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    assert all(binding.sharing_ranks == sum(other.node == binding.node for other in bindings) for binding in bindings)


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5\n", {0, 1, 4, 5})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    """Ranges and single cores; a node without cores has an empty list."""
    assert parse_cpu_list(text) == cores


def test_a_process_is_bound_to_the_cores_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may use the cores of its node alone, and has as many threads as its share of them. A group on GPUs is
    left alone."""
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(numa, "_threads", lambda: [1])
    monkeypatch.setattr(numa, "_NODES", write_nodes(tmp_path, TWO_SOCKETS))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(frozenset(cores)))
    config = GroupConfig(name="g", model="m", served_model_name="m", device="cpu")
    threads = [bind_rank(config, rank, 3)[0].threads for rank in range(3)]
    assert threads == [32, 32, 64]
    assert bound == [parse_cpu_list(TWO_SOCKETS[node]) for node in (0, 0, 1)]
    on_gpu = GroupConfig(name="g", model="m", served_model_name="m", device="cuda")
    assert bind_rank(on_gpu, 0, 2) == (on_gpu, NumaBinding()) and len(bound) == 3
