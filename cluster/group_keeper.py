"""GroupKeeper: holds one group up. Starts its ranks, watches them, and starts all of them again when one ends.

One coroutine, `keep`, is the group's whole life; whoever awaits elsewhere learns of changes through `on_change`. It
does not know routers, nor other groups.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from ..proto.errors import CoatcheckError, Unavailable
from ..workers.group_config import GroupConfig
from ..workers.rank_progress import Phase, RankProgress
from . import cluster_notes, launch
from .cluster_state import GroupState
from .rank_end import RankEnded, brief, cause_of
from .rank_hosts import RankHosts

POLL_SECONDS = 0.1
_STOP_SECONDS = 5.0
_LONGEST_BACKOFF = 30.0
_STEADY_SECONDS = 5.0
# Between two looks at ranks that serve; then how many waits for an answer, and how long ones, a rank may let pass.
# Several short ones: a supervisor that was itself held up finds the answers before it has counted them all.
_LOOK_SECONDS = 1.0
_WAIT_SECONDS = 0.5
_WAITS = 6
# While it starts, a rank imports torch, which answers nobody for a while.
_WAITS_WHILE_STARTING = 120

_RENEWED = "it is being started again, as asked"
_NO_PLACE = "it waits for a place in the Ray cluster"

_log = logging.getLogger(__name__)


class Renewal(Exception):
    """The group is to be ended and started again, though nothing is wrong with it."""


def backoff_seconds(failures: int) -> float:
    """How long to wait before the next start, after so many that did not last."""
    return min(0.25 * 2.0**failures, _LONGEST_BACKOFF)


class GroupKeeper:
    """`state` is always current; `loopback` is the ranks' (see RankActor), and `hosts` is kept current too.

    `has_served`: whether it did so before this keeper's time; then a start that fails is tried again.
    """

    def __init__(
        self,
        config: GroupConfig,
        reserved: PlacementGroup,
        hosts: RankHosts,
        *,
        loopback: bool,
        has_served: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.state = GroupState(config.name, ranks=(RankProgress(),) * config.tp)
        self._config = config
        self._reserved = reserved
        self._hosts = hosts
        self._loopback = loopback
        self._has_served = has_served
        self._on_change = on_change
        self._actors: list[launch.Actor] = []
        self._logs: list[str] = []
        self._lives: list[asyncio.Future[None]] = []  # one per rank: done when it has ended
        self._renewal = asyncio.Event()
        self._changed = asyncio.Event()

    async def adopt(self) -> None:
        """Takes over ranks that a former supervisor has started, if all of them serve; else ends what is left."""
        incarnation, self._actors = launch.find_ranks(self._config.name, self._config.tp)
        if incarnation is None:
            return
        self.state = replace(self.state, restarts=incarnation)
        serves = False
        if len(self._actors) == self._config.tp:
            with suppress(RankEnded):
                await self._read_logs(_WAITS)
                await self._read_progress(_WAITS)
                serves = self._all_serve()
        if serves:
            self._lives = [asyncio.ensure_future(actor.watch.remote()) for actor in self._actors]
            self.state = replace(self.state, state="serving", address=self.state.ranks[0].address)
            _log.info("%s is adopted", self._config.name)
        else:
            self._kill()
            self.state = replace(self.state, restarts=incarnation + 1)

    async def keep(self) -> None:
        """Holds the group up until cancelled; gives up only on one that has never served."""
        failures = 0
        while True:
            serving_since = math.inf
            try:
                if not self._lives:
                    await self._start()
                self._has_served = True
                serving_since = time.monotonic()
                self._change(state="serving", address=self.state.ranks[0].address, reason="")
                await self._watch()
            except RankEnded as ended:
                failures = 0 if time.monotonic() - serving_since > _STEADY_SECONDS else failures + 1
                _log.error("%s is lost: %s", self._config.name, ended)
                # The router is told first: each moment that it knows nothing costs requests.
                self._change(state="lost" if self._has_served else "failed", address="", reason=str(ended))
            except Renewal:
                _log.info("%s is started again", self._config.name)
                self._change(state="lost", address="", reason=_RENEWED)
                await self._end()
                self._change(state="starting", restarts=self.state.restarts + 1, predecessor=None)
                continue
            self._kill()
            if not self._has_served:
                return
            await asyncio.sleep(backoff_seconds(failures))
            self._change(state="starting", restarts=self.state.restarts + 1, predecessor=None)

    def drain(self) -> None:
        """Lets no new work in; what runs goes on. A start ends it."""
        if self.state.state == "serving":
            self._change(state="draining")

    def undrain(self) -> None:
        """Lets work in again."""
        if self.state.state == "draining":
            self._change(state="serving")

    async def wait_started(self) -> None:
        """Returns once the group serves; raises Unavailable when it never will."""
        while self.state.state != "serving":
            self._changed.clear()
            if self.state.state == "failed":
                raise Unavailable(f"{self._config.name} does not start: {self.state.reason}")
            await self._changed.wait()

    async def renew(self) -> None:
        """Ends the ranks and starts others; what still runs moves to other groups. Returns once the new ones serve;
        raises Unavailable when they do not come up at once."""
        before = self.state.restarts
        if self.state.state not in ("serving", "draining"):
            raise Unavailable(
                f"{self._config.name} is {self.state.state}: {self.state.reason or 'wait until it serves'}"
            )
        self._renewal.set()
        while self.state.restarts == before or self.state.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.state.state != "serving":
            raise Unavailable(f"{self._config.name} does not start again: {self.state.reason}")

    async def stop(self, *, now: bool) -> None:
        """Ends the ranks, first with a word (unless `now`), then without."""
        if now:
            self._kill()
        else:
            await self._end()
        cluster_notes.forget_incarnations(self._config.name)

    async def _end(self) -> None:
        if self._actors:
            with suppress(RayError, TimeoutError):  # a rank that hangs does not hear it
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._actors[0].stop.remote()
            if self._lives:
                await asyncio.wait(self._lives, timeout=_STOP_SECONDS)
        self._kill()

    async def _start(self) -> None:
        """Returns once every rank serves; raises RankEnded when one cannot."""
        config, incarnation = self._config, self.state.restarts
        await self._find_place()
        cluster_notes.note_incarnation(config.name, incarnation)
        try:
            for rank in range(config.tp):
                actor = launch.start_rank(
                    config,
                    rank,
                    incarnation,
                    self._reserved,
                    ranks_on_host=self._hosts.busiest(config.name),
                    loopback=self._loopback,
                )
                self._actors.append(actor)
        except ValueError as error:  # Ray has not freed the name of a former rank yet
            raise RankEnded(f"rank {len(self._actors)} could not start: {brief(error)}") from None
        await self._read_logs(_WAITS_WHILE_STARTING)
        await self._read_predecessor()
        (rendezvous,) = await self._ask(self._actors[:1], "rendezvous", _WAITS_WHILE_STARTING)
        self._lives = [asyncio.ensure_future(actor.run.remote(rendezvous)) for actor in self._actors]
        while not self._all_serve():
            ended, _ = await asyncio.wait(self._lives, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if ended:
                await self._first_end()
            await self._read_progress(_WAITS_WHILE_STARTING)

    async def _find_place(self) -> None:
        """Waits until Ray has a place for every rank: a node may be gone, and another to come."""
        while not (hosts := await asyncio.to_thread(launch.hosts_of, self._reserved)):
            if not self.state.reason.startswith(_NO_PLACE):
                _log.warning("%s waits for a place", self._config.name)
                self._change(reason=f"{_NO_PLACE}, which has no room for {self._config.tp} ranks now: is a node lost?")
            await asyncio.sleep(_LOOK_SECONDS)
        self._hosts.note(self._config.name, hosts)

    async def _watch(self) -> None:
        """Waits until a rank ends or hangs, and raises RankEnded (a stopped process keeps its connections), or until
        others are wanted, and raises Renewal."""
        self._renewal.clear()
        watches = [asyncio.ensure_future(watch) for watch in (self._first_end(), self._look(), self._renewal.wait())]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if watches[2] in done:
                raise Renewal
            await done.pop()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._read_progress(_WAITS)

    async def _first_end(self) -> None:
        """Waits until a rank ends, and raises RankEnded with the best reason that any rank gives."""
        await asyncio.wait(self._lives, return_when=asyncio.FIRST_COMPLETED)
        first = next(rank for rank, life in enumerate(self._lives) if life.done())
        if self.state.state != "serving":
            # While starting, one rank may only have lost another that knows more: its own word is worth a moment.
            await asyncio.wait(self._lives, timeout=1.0)
        told = [rank for rank, life in enumerate(self._lives) if life.done() and cause_of(life.exception())]
        rank = told[0] if told else first
        raise RankEnded(self._explain(rank, self._lives[rank].exception()))

    async def _read_progress(self, waits: int) -> None:
        self.state = replace(self.state, ranks=tuple(await self._ask(self._actors, "progress", waits)))

    async def _read_logs(self, waits: int) -> None:
        self._logs = await self._ask(self._actors, "log_file", waits)

    async def _read_predecessor(self) -> None:
        """How the ranks before these have ended, which routers want to know of what ran there."""
        if not self.state.restarts:
            return
        told: list[str | None] = await self._ask(self._actors, "predecessor_crash", _WAITS_WHILE_STARTING)
        crash = next((words for words in told if words), None if None in told else "")
        if crash:
            _log.error("%s had ended by itself: %s", self._config.name, crash)
        self._change(predecessor=crash)

    async def _ask(self, actors: list[launch.Actor], method: str, waits: int) -> list[Any]:
        """Every answer, in order; raises RankEnded for a rank that has ended, or has not answered after `waits`."""
        answers = [asyncio.ensure_future(getattr(actor, method).remote()) for actor in actors]
        silent: set[asyncio.Future[Any]] = set(answers)
        try:
            for _ in range(waits):
                answered, silent = await asyncio.wait(silent, timeout=_WAIT_SECONDS)
                for answer in answered:
                    if error := answer.exception():
                        raise RankEnded(f"rank {answers.index(answer)} has ended: {brief(error)}")
                if not silent:
                    return [answer.result() for answer in answers]
            rank = next(rank for rank, answer in enumerate(answers) if not answer.done())
            raise RankEnded(f"rank {rank} hangs: it has not answered for {waits * _WAIT_SECONDS:g} s")
        finally:
            for answer in answers:
                # What it still has to say is no longer news to anybody.
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _explain(self, rank: int, error: BaseException | None) -> str:
        """A line for people: our own errors as they are, everything else with the rank."""
        cause = cause_of(error)
        if isinstance(cause, CoatcheckError):
            return str(cause)
        return f"rank {rank} has ended: {brief(cause or error)} (log: {self._logs[rank]})"

    def _all_serve(self) -> bool:
        return all(rank.phase is Phase.SERVING for rank in self.state.ranks)

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        for life in self._lives:
            # Its end is no longer news to anybody.
            life.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._actors, self._lives = [], []

    def _change(self, **changed: object) -> None:
        self.state = replace(self.state, **changed)  # type: ignore[arg-type]  # names and types are GroupState's
        if self.state.state not in ("serving", "draining"):
            self.state = replace(self.state, ranks=(RankProgress(),) * self._config.tp)
        self._changed.set()
        self._on_change()
