"""GroupSupervisor: holds one group up. Starts its ranks, watches them, and starts all of them again when one ends.

One coroutine, `keep`, is the group's whole life; whoever awaits elsewhere learns of changes through `on_change`. It
does not know Ray, routers, nor other groups.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from coatcheck.cluster.supervision.cluster_state import GroupState
from coatcheck.cluster.supervision.rank_actors import RankActors
from coatcheck.cluster.supervision.rank_end import RankEnded
from coatcheck.proto.errors import Unavailable
from coatcheck.workers.core.rank_progress import Phase, RankProgress

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between two looks at ranks that serve
_LONGEST_BACKOFF = 30.0
_STEADY_SECONDS = 5.0

_RENEWED = "it is being started again, as asked"
_NO_PLACE = "it waits for a place in the Ray cluster"

_log = logging.getLogger(__name__)


class Renewal(Exception):
    """The group is to be ended and started again, though nothing is wrong with it."""


def backoff_seconds(failures: int) -> float:
    """How long to wait before the next start, after so many that did not last."""
    return min(0.25 * 2.0**failures, _LONGEST_BACKOFF)


class GroupSupervisor:
    """`state` is always current. `has_served`: whether it did so before this keeper's time; then a start that fails is
    tried again."""

    def __init__(
        self,
        ranks: RankActors,
        *,
        has_served: bool,
        on_change: Callable[[], None],
        backoff: Callable[[int], float] = backoff_seconds,
    ) -> None:
        self.state = GroupState(ranks.group, ranks=(RankProgress(),) * ranks.tp)
        self._ranks = ranks
        self._has_served = has_served
        self._on_change = on_change
        self._backoff = backoff
        self._renewal = asyncio.Event()
        self._changed = asyncio.Event()

    async def adopt(self) -> None:
        """Takes over ranks that a former supervisor has started, if all of them serve; else ends what is left."""
        number, ranks = await self._ranks.adopt()
        if number is None:
            return
        # Where a start before them failed early, theirs was a smaller one, and how they end will not be known.
        self.state = replace(self.state, restarts=number, incarnation=number)
        if ranks:
            self.state = replace(self.state, state="serving", address=ranks[0].address, ranks=ranks)
            _log.info("%s is adopted", self.state.name)
        else:
            self.state = replace(self.state, restarts=number + 1, incarnation=number + 1)

    async def keep(self) -> None:
        """Holds the group up until cancelled; gives up only on one that has never served."""
        failures = 0
        while True:
            serving_since = math.inf
            try:
                if not self._ranks.have_begun:
                    await self._start()
                self._has_served = True
                serving_since = time.monotonic()
                self._change(state="serving", address=self.state.ranks[0].address, reason="")
                await self._watch()
            except RankEnded as ended:
                failures = 0 if time.monotonic() - serving_since > _STEADY_SECONDS else failures + 1
                _log.error("%s is lost: %s", self.state.name, ended)
                # The router is told first: each moment that it knows nothing costs requests.
                self._change(state="lost" if self._has_served else "failed", address="", reason=str(ended))
                had_run = self._ranks.have_begun
                self._ranks.kill()
                if not self._has_served:
                    return
                await asyncio.sleep(self._backoff(failures))
                self._next(had_run)
            except Renewal:
                _log.info("%s is started again", self.state.name)
                self._change(state="lost", address="", reason=_RENEWED)
                await self._ranks.end()
                self._next(had_run=True)

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
                raise Unavailable(f"{self.state.name} does not start: {self.state.reason}")
            await self._changed.wait()

    async def renew(self) -> None:
        """Ends the ranks and starts others; what still runs moves to other groups. Returns once the new ones serve;
        raises Unavailable when they do not come up at once."""
        before = self.state.restarts
        if self.state.state not in ("serving", "draining"):
            raise Unavailable(f"{self.state.name} is {self.state.state}: {self.state.reason or 'wait until it serves'}")
        self._renewal.set()
        while self.state.restarts == before or self.state.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.state.state != "serving":
            raise Unavailable(f"{self.state.name} does not start again: {self.state.reason}")

    async def stop(self, *, now: bool) -> None:
        """Ends the ranks, first with a word (unless `now`), then without."""
        if now:
            self._ranks.kill()
        else:
            await self._ranks.end()
        self._ranks.forget()

    async def _start(self) -> None:
        """Returns once every rank serves; raises RankEnded when one cannot."""
        await self._find_place()
        await self._ranks.start(self.state.restarts, self.state.incarnation)
        await self._read_predecessor()
        await self._ranks.begin()
        while not all(rank.phase is Phase.SERVING for rank in self.state.ranks):
            await self._ranks.live(_POLL_SECONDS)
            self.state = replace(self.state, ranks=await self._ranks.progress())

    async def _find_place(self) -> None:
        while not await self._ranks.find_place():
            if not self.state.reason.startswith(_NO_PLACE):
                _log.warning("%s waits for a place", self.state.name)
                self._change(reason=f"{_NO_PLACE}, which has no room for {self._ranks.tp} ranks now: is a node lost?")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_predecessor(self) -> None:
        """How the ranks before these have ended, which routers want to know of what ran there."""
        if not self.state.incarnation:
            return
        crash = await self._ranks.predecessor_crash()
        if crash:
            _log.error("%s had ended by itself: %s", self.state.name, crash)
        self._change(predecessor=crash)

    async def _watch(self) -> None:
        """Waits until a rank ends or hangs, and raises RankEnded (a stopped process keeps its connections), or until
        others are wanted, and raises Renewal."""
        self._renewal.clear()
        watches = [asyncio.ensure_future(watch) for watch in (self._ranks.live(), self._look(), self._renewal.wait())]
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
            self.state = replace(self.state, ranks=await self._ranks.progress())

    def _next(self, had_run: bool) -> None:
        """The next start. It makes another incarnation only if there was one: what is to be learned of how the last one
        has ended is learned by ranks that come so far."""
        incarnation = self.state.incarnation + had_run
        self._change(state="starting", restarts=self.state.restarts + 1, incarnation=incarnation, predecessor=None)

    def _change(self, **changed: object) -> None:
        self.state = replace(self.state, **changed)  # type: ignore[arg-type]  # names and types are GroupState's
        if self.state.state not in ("serving", "draining"):
            self.state = replace(self.state, ranks=(RankProgress(),) * self._ranks.tp)
        self._changed.set()
        self._on_change()
