"""What each change of a running cluster takes, and what its streams notice.

    python bench/failure_cases/changes.py [--part settings] [--json bench/results/changes.json]

`coatcheck serve --apply` on a Ray of several nodes as KubeRay makes them: a head, router nodes, and a worker node for
each group. Three streams run all the time and are compared with an undisturbed run.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

import grpc
import psutil
import typer
import yaml
from rich.console import Console

from coatcheck.bench.chaos import make_small_checkpoint
from coatcheck.bench.failure_cases.chaos_load import ChaosLoad, cases
from coatcheck.bench.setup.checkpoint import VOCABULARY
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import RayNode, RayNodes
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

_STREAMS = 3
_ROUTER = {"coatcheck_router": 1.0}
_APPLIED = "settings: all are in use"
_CALL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ChangeFigures:
    """One change. `seconds`: until it was complete. `longest_stall`: the most seconds that a stream was without an
    event. The rest are numbers of streams; `refused` ones had not begun."""

    change: str
    seconds: float
    longest_stall: float
    ended: int
    moved: int
    refused: int
    failed: int
    changed: int


class ChangingCluster:
    """A context manager: one router and two groups serve when it is entered."""

    def __init__(self, checkpoint: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._settings: dict[str, Any] = {"groups": 2, "kv-memory": "12MiB", "dtype": "float32"}
        self._ray = RayNodes(scratch)
        self._log = scratch / "serve.log"
        self._log.touch()
        self._file = scratch / "serve.yaml"
        command = [str(Path(sys.executable).with_name("coatcheck")), "serve", str(checkpoint), "--config"]
        command += [str(self._file), "--apply", "--grpc-port", "0", "--http-port", "none", "--router-per-node"]
        self._command = [*command, "--router-resource", "coatcheck_router", "--ray-address", self._ray.address]
        self.router_nodes: list[RayNode] = []

    def __enter__(self) -> Self:
        self._ray.__enter__()
        try:
            self.add_router_node()
            for _ in range(2):
                self._ray.add(1)
            self._write()
            with self._log.open("wb") as output:
                self._serve = subprocess.Popen(
                    self._command, stderr=output, stdout=output, env={**os.environ, **self._ray.environment}
                )
            self.wait_line("ready: ")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_serve"):
            self._serve.kill()
            self._serve.wait()
        self._ray.__exit__()

    def change(self, until: str = _APPLIED, **settings: Any) -> None:
        """Change settings in the file. Return once `serve` prints a line that begins with `until`."""
        before = self._log.read_text().count(f"\n{until}")
        self._settings |= {name.replace("_", "-"): value for name, value in settings.items()}
        self._write()
        self.wait_line(until, more_than=before)

    def add_router_node(self) -> None:
        """Add a node on which a router may run, and wait until one serves there with every group."""
        self.router_nodes.append(self._ray.add(0, _ROUTER))
        if hasattr(self, "_serve"):
            self._wait(lambda: self.router_address(self.router_nodes[-1]) != "", "the router of a new node serves")

    def remove_router_node(self, node: RayNode) -> None:
        """As the chart's router pods end: drain the router, then end its node."""
        with grpc.insecure_channel(self.router_address(node)) as channel:
            AdminStub(channel).Drain(pb.DrainRequest(), timeout=MAX_WAIT_SECONDS)  # type: ignore[no-untyped-call]
        self.router_nodes.remove(node)
        self._ray.kill(node)

    def add_worker_node(self) -> None:
        self._ray.add(1)

    def kill_node_of(self, group: str) -> None:
        """Kill the worker node of a group, with its processes."""
        pid = next(one for one in self._groups() if one.name == group).ranks[0].pid
        self._ray.kill(next(node for node in self._ray.nodes if pid in node.processes()))
        self._wait(lambda: not self._is_whole(), f"{group} is lost")

    def wait_whole(self) -> None:
        """Wait until every group serves for every router."""
        self._wait(self._is_whole, "every group serves")

    def restart(self) -> None:
        """Run `coatcheck restart`, which an operator runs after an upgrade."""
        command = [self._command[0], "restart", "--ray-address", self._ray.address]
        environment = {**os.environ, **self._ray.environment}
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=2 * MAX_WAIT_SECONDS)

    def router_address(self, node: RayNode) -> str:
        """The gRPC address of the router on a node; "" unless it serves with every group."""
        for pid, command in node.processes().items():
            if command.startswith("ray::RouterActor"):
                with suppress(psutil.Error):  # it has just ended
                    sockets = psutil.Process(pid).net_connections(kind="tcp")
                    ports = [one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN]
                    addresses = [f"127.0.0.1:{port}" for port in ports]
                    return next((address for address in addresses if self._serves(address)), "")
        return ""

    def wait_line(self, beginning: str, more_than: int = 0) -> None:
        """Wait until `serve` has printed more than `more_than` lines with this beginning."""
        self._wait(lambda: f"\n{self._log.read_text()}".count(f"\n{beginning}") > more_than, beginning)

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(yaml.safe_dump(self._settings))
        part.replace(self._file)

    def _serves(self, address: str) -> bool:
        status = read_status(address)
        return status is not None and len([one for one in status.groups if one.state == "serving"]) >= self._wanted()

    def _wanted(self) -> int:
        return int(self._settings["groups"])

    def _is_whole(self) -> bool:
        return all(self.router_address(node) for node in self.router_nodes)

    def _groups(self) -> list[pb.GroupStatus]:
        status = read_status(self.router_address(self.router_nodes[0]))
        assert status is not None
        return list(status.groups)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while not holds():
            self._ray.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {MAX_WAIT_SECONDS:g} s\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)


def read_status(address: str) -> pb.StatusResponse | None:
    """The status of the router at this address; None if none answers there."""
    with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
        stub = AdminStub(channel)  # type: ignore[no-untyped-call]
        status: pb.StatusResponse = stub.Status(pb.StatusRequest(), timeout=_CALL_SECONDS)
        return status
    return None


class ChangeMeter:
    """Makes changes under one load, one after another."""

    def __init__(self, load: ChaosLoad) -> None:
        self._load = load

    async def measure(self, change: str, act: Callable[[], None]) -> ChangeFigures:
        """Make a change, and wait until every stream that ran at its end has got a further event."""
        counts, began = Counter(self._load.counts), time.monotonic()
        await asyncio.to_thread(act)
        seconds = time.monotonic() - began
        await asyncio.to_thread(self._wait_for_events)
        stalls = [stall for when, stall in self._load.stalls if when > began]
        counts = self._load.counts - counts
        names = ("ended", "moved", "refused", "failed", "changed")
        return ChangeFigures(
            change, round(seconds, 1), round(max(stalls, default=0.0), 2), *(counts[name] for name in names)
        )

    def _wait_for_events(self) -> None:
        """Wait until each stream that runs now has got another event or has ended."""
        ran = [(one, one.events) for one in tuple(self._load.running)]
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while any(one.events == events and not one.ended for one, events in ran) and time.monotonic() < deadline:
            time.sleep(0.05)


class ChangeKind(StrEnum):
    """Changes that are made one after another."""

    SETTINGS = "settings"
    ROUTERS = "routers"
    NODES = "nodes"


def main(
    parts: Annotated[list[ChangeKind] | None, typer.Option("--part", help="Make these changes; default: all.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Make each change once while streams run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the context managers, which end Ray
    with TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        checkpoint = make_small_checkpoint(scratch / "llama-small")
        with ChangingCluster(checkpoint, scratch) as cluster:
            asyncio.run(Run(cluster, json_path).run(parts or list(ChangeKind)))


class Run:
    """Makes the changes of several parts, and prints and writes each row at once."""

    def __init__(self, cluster: ChangingCluster, json_path: Path | None) -> None:
        self._cluster = cluster
        self._json_path = json_path
        self._console = Console()
        self._requests = cases(VOCABULARY, 100)
        self._expected: list[GenerationResult] = []
        self._rows: list[ChangeFigures] = []

    async def run(self, parts: list[ChangeKind]) -> None:
        cluster = self._cluster
        if ChangeKind.SETTINGS in parts:
            await self._measure(
                ("queue-target", lambda: cluster.change("the settings have changed", queue_target=3)),
                ("kv-memory: two groups start again", lambda: cluster.change(kv_memory="10MiB")),
                ("max-queued, the only router", lambda: cluster.change(max_queued=900)),
                ("block-size: refused", lambda: cluster.change("error: a running cluster cannot", block_size=32)),
                ("block-size as before", lambda: cluster.change("the settings have changed", block_size=16)),
            )
        if ChangeKind.ROUTERS in parts:
            await self._measure(("routers 1 to 2, with the start of the node", cluster.add_router_node))
            # From here on clients know both routers.
            await self._measure(
                ("max-queued, one router after the other", lambda: cluster.change(max_queued=800)),
                ("restart: supervisor and two groups", cluster.restart),
                ("routers 2 to 1", lambda: cluster.remove_router_node(cluster.router_nodes[0])),
            )
        if ChangeKind.NODES in parts:
            await self._measure(
                ("groups 2 to 3, with the start of the node", lambda: grow(cluster)),
                ("groups 3 to 2", lambda: cluster.change(groups=2)),
                ("a node lost, another one is free", lambda: lose_node(cluster, "group-0", is_free=True)),
                ("a node lost, a new one joins", lambda: lose_node(cluster, "group-1", is_free=False)),
            )

    async def _measure(self, *changes: tuple[str, Callable[[], None]]) -> None:
        """Make changes while streams run through all routers that serve at the start."""
        cluster = self._cluster
        load = ChaosLoad([cluster.router_address(node) for node in cluster.router_nodes], self._requests)
        if self._expected:
            load.expected = self._expected
        else:
            await load.learn()
            self._expected = load.expected
        keeping = asyncio.create_task(load.keep_streams(_STREAMS))
        measurement = ChangeMeter(load)
        for change, act in changes:
            self._rows.append(await measurement.measure(change, act))
            self._console.print(self._rows[-1], highlight=False, soft_wrap=True)
            figures = {"machine": describe_machine(), "changes": [asdict(row) for row in self._rows]}
            write_results(self._json_path, figures)
        load.stop()
        await asyncio.wait_for(keeping, MAX_WAIT_SECONDS)
        await load.close()
        for fault in load.faults:
            self._console.print(fault, soft_wrap=True, markup=False)


def grow(cluster: ChangingCluster) -> None:
    cluster.add_worker_node()
    cluster.change(groups=3)
    cluster.wait_whole()


def lose_node(cluster: ChangingCluster, group: str, *, is_free: bool) -> None:
    """Kill the node of a group. Return once every group serves again, on a node that is free or on a new one."""
    cluster.kill_node_of(group)
    if not is_free:
        cluster.add_worker_node()
    cluster.wait_whole()


if __name__ == "__main__":
    typer.run(main)
