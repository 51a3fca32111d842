"""Strikes for bench/chaos.py: which process is killed or stopped, and at what moment of the streams.

A process may also get SIGSEGV, as from a defect of its own. Between strikes every stream gets further tokens: a
request whose groups crash twice, or are lost three times, without a token in between is refused as poison.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coatcheck.bench.failure_cases.chaos_cluster import ChaosCluster
from coatcheck.bench.failure_cases.chaos_load import LONG_PROMPT, ChaosLoad, Running
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb

MOMENTS = ("any", "prefill", "scale out", "restore", "drain", "failover", "any", "scale in")
_SCALING_SECONDS = {"scale out": 6.0, "scale in": 2.0}  # a kill comes within this time after the command
_LOSS_SECONDS = 0.3  # from a kill until every process knows of it
_REPEATED_PROMPTS = 8  # long prompts that are sent repeatedly, so that host memory holds some


@dataclass(frozen=True, slots=True)
class Strike:
    """One kill or stop. `longest_stall`: the most seconds that a stream was without an event after it."""

    kind: str
    moment: str
    longest_stall: float
    alone: bool  # False if another group was lost, drained or scaled at about the same time


class Striker:
    """Strikes one cluster under one load."""

    def __init__(self, cluster: ChaosCluster, load: ChaosLoad, rng: random.Random) -> None:
        self.found: list[float] = []  # seconds from each stop of a rank until its group was lost
        self._cluster = cluster
        self._load = load
        self._rng = rng
        self._last_repeated = 0
        self._long = [case for case in range(len(load.requests)) if load.is_long(case)]

    async def strike(self, kind: str, moment: str) -> list[Strike]:
        """Make one kill, or two for a failover; return once every stream that ran has got further events."""
        await asyncio.to_thread(self._cluster.wait_whole, MAX_WAIT_SECONDS)
        groups = await asyncio.to_thread(self._cluster.serving)
        victim = self._rng.choice(groups)
        made = [(kind, moment)]
        mine: asyncio.Task[None] | None = None
        begun = await self._begin_restore() if moment == "restore" else None
        if moment == "restore" and begun is None:
            made = [(kind, moment := "prefill")]
        if moment in ("prefill", "restore"):
            mine, running = begun or await self._begin_prefill()
            victim = next((group for group in groups if group.name == running.group), victim)
        began = time.monotonic()
        if moment in _SCALING_SECONDS:
            return await self._strike_scaling(kind, moment, victim)
        if moment == "drain":
            drained = self._rng.choice(groups).name
            await asyncio.to_thread(self._cluster.drain, drained)
        if moment == "failover":
            # Streams leave this group first. The second kill hits them while they move, or on their new group.
            made.append(("rank", "any"))
            await self._kill_or_stop("rank", victim)
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            victim = next(group for group in groups if group is not victim)
        await self._kill_or_stop(kind, victim)
        await self._wait_for_events()
        if mine is not None:
            await asyncio.wait_for(mine, MAX_WAIT_SECONDS)
        if moment == "drain":
            await asyncio.to_thread(self._cluster.drain, drained, undo=True)
        stall = self._longest_stall(began)
        return [Strike(name, when, stall, len(made) == 1 and moment != "drain") for name, when in made]

    async def _strike_scaling(self, kind: str, moment: str, victim: pb.GroupStatus) -> list[Strike]:
        """Make one kill while a group is added or removed, then restore the number of groups. The scale command may
        fail with the supervisor; no stream may."""
        few, many = self._cluster.groups, self._cluster.groups + 1
        await asyncio.to_thread(self._cluster.add_spare)
        if moment == "scale in":
            await _wait_until(lambda: self._cluster.scale(many), "there is one group more")
            victim = self._rng.choice(await asyncio.to_thread(self._cluster.serving) or [victim])
        began = time.monotonic()
        scaling = asyncio.create_task(asyncio.to_thread(self._cluster.scale, few if moment == "scale in" else many))
        await asyncio.sleep(self._rng.uniform(0.0, _SCALING_SECONDS[moment]))
        await self._kill_or_stop(kind, victim)
        await scaling
        await self._wait_for_events()
        await _wait_until(lambda: self._cluster.scale(few), "there are as many groups as before")
        return [Strike(kind, moment, self._longest_stall(began), alone=False)]

    def _longest_stall(self, began: float) -> float:
        return max((seconds for when, seconds in self._load.stalls if when > began), default=0.0)

    async def _kill_or_stop(self, kind: str, group: pb.GroupStatus) -> None:
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
                await _wait_until(lambda: bool(self._cluster.pids(kind)), f"there is a {kind}")
                for pid in self._cluster.pids(kind):
                    _kill(pid)
            case "serve":
                self._cluster.kill_serve()
            case "node":
                self._cluster.kill_node(pids[0])
            case "fault":
                _kill(self._rng.choice(pids), signal.SIGSEGV)
            case "stop":
                await self._stop(self._rng.choice(pids), group.name)

    async def _stop(self, pid: int, group: str) -> None:
        """Send SIGSTOP. Wait until the group is lost and the process has ended."""
        began = time.monotonic()
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        await _wait_until(lambda: all(serving.name != group for serving in self._cluster.serving()), f"{group} is lost")
        self.found.append(time.monotonic() - began)
        await _wait_until(lambda: not _is_alive(pid), f"the stopped rank of {group} has ended")

    async def _begin_prefill(self) -> tuple["asyncio.Task[None]", Running]:
        """Start streams until one is in its prefill; return it."""
        while True:
            if begun := await self._begin(self._rng.choice(self._long), ""):
                return begun

    async def _begin_restore(self) -> tuple["asyncio.Task[None]", Running] | None:
        """Start a stream whose prompt is fetched from host memory; return None if no prompt stays there for long."""
        for _ in range(_REPEATED_PROMPTS):
            for number in range(_REPEATED_PROMPTS):
                case, salt = self._long[number % len(self._long)], f"repeated {number}"
                is_on_host = await self._cluster.host_tokens(self._load.request(case, salt)) >= LONG_PROMPT // 2
                if is_on_host and (begun := await self._begin(case, salt)):
                    return begun
            # The load evicts this prompt from the pool to host memory after a while.
            number = self._last_repeated = (self._last_repeated + 1) % _REPEATED_PROMPTS
            await self._load.run(self._long[number % len(self._long)], f"repeated {number}")
        return None

    async def _begin(self, case: int, salt: str) -> tuple["asyncio.Task[None]", Running] | None:
        """Start a stream and return it before its first token; None if the token came too soon."""
        before = set(self._load.running)
        task = asyncio.create_task(self._load.run(case, salt))
        while not task.done():
            await asyncio.sleep(0.001)
            mine = next((stream for stream in self._load.running - before if stream.task is task), None)
            if mine is not None and mine.in_prefill:
                return task, mine
            if mine is not None and mine.events > 1:
                await task
        return None

    async def _wait_for_events(self) -> None:
        """Wait until each stream that runs now has got another event or has ended."""
        await asyncio.sleep(_LOSS_SECONDS)
        before = [(running, running.events) for running in self._load.running]
        await _wait_until(
            lambda: all(running.ended or running.events > events for running, events in before), "streams go on"
        )


async def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {MAX_WAIT_SECONDS:g} s")
        await asyncio.sleep(0.05)


def _kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return  # an earlier strike has ended it meanwhile


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
