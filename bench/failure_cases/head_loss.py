"""What ends when Ray's head is lost, with Redis and without: streams, `coatcheck serve`, routers, ranks.

    python bench/failure_cases/head_loss.py [--json bench/results/head_loss.json]

Two groups on two nodes, the router on one of them, none on the head; four streams run all the time. The head is killed
with kill -9: its process alone (gcs_server), or all of its node. In one case it is started again without its state.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from coatcheck.bench.chaos import make_small_checkpoint
from coatcheck.bench.failure_cases.chaos_load import ChaosLoad, cases
from coatcheck.bench.setup.checkpoint import VOCABULARY
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import RayNodes
from coatcheck.bench.setup.redis_server import redis_server
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.servers import free_port

_STREAMS = 4
_TITLES = {"supervisor": "ray::Supervisor", "router": "ray::RouterActor", "ranks": "ray::RankActor"}


@dataclass(frozen=True)
class HeadLoss:
    """One way to lose the head; `back_after`: seconds until it is started again, None: never."""

    name: str
    redis: bool
    whole_node: bool
    back_after: float | None
    watched_seconds: float


LOSSES = (
    HeadLoss("its process, with Redis", True, False, None, 30.0),
    HeadLoss("its node, with Redis", True, True, 10.0, 30.0),
    HeadLoss("its process, without Redis", False, False, None, 75.0),
    HeadLoss("its node, without Redis", False, True, None, 75.0),
    HeadLoss("its node, without Redis, and back", False, True, 10.0, 75.0),
)


class HeadLossCase:
    """A cluster whose Ray head is killed."""

    def __init__(self, nodes: RayNodes, checkpoint: Path, scratch: Path) -> None:
        self.nodes = nodes
        self.address = f"127.0.0.1:{free_port()}"
        self._log = scratch / "serve.log"
        self._flags = [str(checkpoint), "--groups", "2", "--dtype", "float32", "--kv-memory", "24MiB"]
        self._flags += ["--grpc-port", self.address.rpartition(":")[2], "--http-port", "none"]
        self._flags += ["--router-resource", "front", "--ray-address", nodes.address]

    def start(self) -> float:
        """Start the nodes and `coatcheck serve`; return the seconds until all groups serve."""
        began = time.monotonic()
        self.nodes.add(1, {"front": 1})
        self.nodes.add(1)
        while self.nodes.count() < 3:
            time.sleep(0.1)
        command = [str(Path(sys.executable).with_name("coatcheck")), "serve", *self._flags]
        with self._log.open("wb") as output:
            environment = {**os.environ, **self.nodes.environment}
            self.serve = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        while b"ready: " not in self._log.read_bytes():
            if self.serve.poll() is not None or time.monotonic() - began > MAX_WAIT_SECONDS:
                raise RuntimeError(f"coatcheck serve does not come up: {self.last_log_line()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def last_log_line(self) -> str:
        """The last line that `coatcheck serve` has printed."""
        return (self._log.read_text().strip().splitlines() or [""])[-1]

    def pids(self, title: str) -> set[int]:
        """The process ids of the actors of a class on all nodes."""
        return {pid for pid, command in self.nodes.processes().items() if command.startswith(title)}

    def kill_head(self, *, whole_node: bool) -> None:
        """Kill the head with kill -9."""
        if whole_node:
            self.nodes.head.kill()
            return
        (pid,) = (pid for pid, command in self.nodes.head.processes().items() if "gcs_server" in command.split()[0])
        os.kill(pid, 9)


@contextmanager
def case_of(loss: HeadLoss, checkpoint: Path, scratch: Path) -> Iterator[HeadLossCase]:
    """A context manager that kills everything it has started."""
    with redis_server(scratch) if loss.redis else nullcontext() as address:
        environment = {"RAY_REDIS_ADDRESS": address} if address else {}
        with RayNodes(scratch, environment=environment) as nodes:
            case = HeadLossCase(nodes, checkpoint, scratch)
            try:
                yield case
            finally:
                if hasattr(case, "serve"):
                    case.serve.kill()
                    case.serve.wait()


async def lose(loss: HeadLoss, checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Kill the head; return after how many seconds each thing ended, None for what did not."""
    with case_of(loss, checkpoint, scratch) as case:
        case.start()
        load = ChaosLoad(case.address, cases(VOCABULARY, 60))
        await load.learn()
        keeping = asyncio.create_task(load.keep_streams(_STREAMS))
        await asyncio.sleep(3.0)
        mine = {name: case.pids(title) for name, title in _TITLES.items()}
        case.kill_head(whole_node=loss.whole_node)
        began, before = time.monotonic(), load.counts["ended"]
        ended: dict[str, float | None] = dict.fromkeys([*_TITLES, "serve"])
        said, is_back = "", False
        while (after := time.monotonic() - began) < loss.watched_seconds:
            if loss.back_after is not None and after > loss.back_after and not is_back:
                is_back = True
                await asyncio.to_thread(case.nodes.start_head)
            if ended["serve"] is None and case.serve.poll() is not None:
                ended["serve"], said = after, case.last_log_line()
            for name, pids in mine.items():
                if ended[name] is None and not pids & case.pids(_TITLES[name]):
                    ended[name] = after
            await asyncio.sleep(0.2)
        load.stop()
        await asyncio.wait([keeping], timeout=15.0)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await load.close()
        stalls = [seconds for when, seconds in load.stalls if when > began]
        return {
            "lost": loss.name,
            "back_after_seconds": loss.back_after,
            "ended_after_seconds": {name: when and round(when, 1) for name, when in ended.items()},
            "streams_ended_well": load.counts["ended"] - before,
            "streams_failed": load.counts["failed"],
            "streams_changed": load.counts["changed"],
            "refused": load.counts["refused"],
            "longest_stall_seconds": round(max(stalls, default=0.0), 2),
            "serve_exit": case.serve.poll(),
            "serve_said": said,
            "faults": load.faults[:3],
        }


def main(
    only: Annotated[str | None, typer.Option(help="Only losses whose name has this in it.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Lose the head, each way in turn."""
    # SIGTERM must unwind the context managers, which end Ray.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(soft_wrap=True)
    figures: dict[str, Any] = {"machine": describe_machine(), "losses": []}
    with TemporaryDirectory() as name:
        checkpoint = make_small_checkpoint(Path(name) / "llama-small")
        for number, loss in enumerate(loss for loss in LOSSES if only is None or only in loss.name):
            scratch = Path(name) / str(number)
            scratch.mkdir()
            figures["losses"].append(asyncio.run(lose(loss, checkpoint, scratch)))
            console.print_json(json.dumps(figures["losses"][-1]))
    write_results(json_path, figures)


if __name__ == "__main__":
    typer.run(main)
