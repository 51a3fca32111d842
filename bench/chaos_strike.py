"""Strikes for bench/chaos.py: which process is killed or stopped, and at what moment of the streams.

Between strikes every stream comes further: a request whose groups are lost three times without a token in between is
refused as poison, by contract, whoever has killed them. It does not know what streams should answer.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coatcheck.bench.chaos_cluster import ChaosCluster
from coatcheck.bench.chaos_load import ChaosLoad, Running
from coatcheck.proto import coatcheck_pb2 as pb

KINDS = ("rank", "rank 0", "group", "router", "supervisor", "serve", "stop")
MOMENTS = ("any", "prefill", "any", "failover")
_BESIDE_GROUPS = ("router", "supervisor", "serve")
_PATIENCE = 180.0
_LOSS_SECONDS = 0.3  # from a kill to its being known everywhere


@dataclass(frozen=True, slots=True)
class Strike:
    """What was done. `longest_stall`: seconds that a stream then was without an event, until all came further."""

    kind: str
    moment: str
    longest_stall: float


class Striker:
    """Strikes one cluster under one load."""

    def __init__(self, cluster: ChaosCluster, load: ChaosLoad, rng: random.Random) -> None:
        self.found: list[float] = []  # seconds from each stop of a rank to its group's being lost
        self._cluster = cluster
        self._load = load
        self._rng = rng

    async def strike(self, kind: str, moment: str) -> list[Strike]:
        """One kill, or two for a failover; returns once every stream that ran has come further."""
        groups = await self._serving_groups()
        began = time.monotonic()
        made = [(kind, moment)]
        victim = self._rng.choice(groups).name
        prefill: asyncio.Task[None] | None = None
        if moment == "prefill":
            prefill, running = await self._begin_prefill()
            victim = running.group
        elif moment == "failover":
            # The group that streams leave first; they are then struck on their way, or where they arrive.
            made.append(("rank", "any"))
            await self._hit("rank", next(group for group in groups if group.name == victim))
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            others = [group for group in groups if group.name != victim]
            if not others and kind not in _BESIDE_GROUPS:
                others = await self._serving_groups()
            groups = others or groups
            victim = groups[0].name
        group = next((group for group in groups if group.name == victim), groups[0])
        await self._hit(kind, group)
        await self._settle()
        if prefill is not None:
            await asyncio.wait_for(prefill, _PATIENCE)
        stall = max((seconds for when, seconds in self._load.stalls if when > began), default=0.0)
        return [Strike(name, when, stall) for name, when in made]

    async def _hit(self, kind: str, group: pb.GroupStatus) -> None:
        pids = [rank.pid for rank in group.ranks]
        match kind:
            case "rank":
                _kill(self._rng.choice(pids[1:] or pids))
            case "rank 0":
                _kill(pids[0])
            case "group":
                for pid in pids:
                    _kill(pid)
            case "router" | "supervisor":
                title = {"router": "RouterActor", "supervisor": "Supervisor"}[kind]
                await _until(lambda: bool(self._cluster.actors(title)), f"there is a {kind}")
                for pid in self._cluster.actors(title):
                    _kill(pid)
            case "serve":
                if self._cluster.serve.poll() is not None:
                    raise RuntimeError(f"coatcheck serve has ended by itself with {self._cluster.serve.returncode}")
                self._cluster.serve.kill()
                self._cluster.serve.wait()
                self._cluster.start_serve()
            case "stop":
                await self._stop(self._rng.choice(pids), group.name)

    async def _stop(self, pid: int, group: str) -> None:
        """SIGSTOP, until the process is gone."""
        began = time.monotonic()
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        await _until(lambda: all(serving.name != group for serving in self._cluster.serving()), f"{group} is lost")
        self.found.append(time.monotonic() - began)
        await _until(lambda: not _lives(pid), f"the stopped rank of {group} has ended")

    async def _begin_prefill(self) -> tuple["asyncio.Task[None]", Running]:
        """A stream whose prompt is being computed just now."""
        long = [case for case in range(len(self._load.requests)) if self._load.is_long(case)]
        while True:
            before = set(self._load.running)
            task = asyncio.create_task(self._load.run(self._rng.choice(long)))
            while not task.done():
                await asyncio.sleep(0.001)
                mine = next((stream for stream in self._load.running - before if stream.task is task), None)
                if mine is not None and mine.in_prefill:
                    return task, mine
                if mine is not None and mine.events > 1:
                    await task

    async def _settle(self) -> None:
        """Until each stream that runs has come further than it is now."""
        await asyncio.sleep(_LOSS_SECONDS)
        before = [(running, running.events) for running in self._load.running]
        await _until(
            lambda: all(running.ended or running.events > events for running, events in before), "streams go on"
        )

    async def _serving_groups(self) -> list[pb.GroupStatus]:
        deadline = time.monotonic() + _PATIENCE
        while not (groups := await asyncio.to_thread(self._cluster.serving)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no group serves after {_PATIENCE:g} s")
            await asyncio.sleep(0.05)
        return groups


async def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {_PATIENCE:g} s")
        await asyncio.sleep(0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # an earlier strike has ended it meanwhile


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
