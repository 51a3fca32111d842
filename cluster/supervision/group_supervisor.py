"""GroupSupervisor: keeps one group running. Starts its ranks, watches them, and restarts all of them when one ends.

`supervise_group` is one coroutine for the whole lifetime of the group. The other methods read `state`, set events for
that coroutine, or end the ranks. `on_change` is called after every change of `state` that routers must know.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.rank_end import MEMORY_KILL, PROCESS_DIED, RankEnded
from coatcheck.proto.errors import Unavailable
from coatcheck.workers.core.rank_progress import Phase, RankProgress

_POLL_SECONDS = 0.1
_NODE_SECONDS = 0.5  # between two looks whether Ray has room for the ranks
_MAX_BACKOFF_SECONDS = 30.0
_STABLE_SECONDS = 5.0  # a group that served for longer than this starts with the shortest backoff again

_RESTART_REQUESTED = "it is being started again, as asked"
_BY_COMMAND = "requested by `coatcheck restart`"
_KILLED = "; no rank crashed: it was killed (SIGKILL), for example by the kernel's out-of-memory killer"
_NO_NODES = "it waits for nodes"

_log = logging.getLogger(__name__)


class RestartRequested(Exception):
    """Raised in `supervise_group` after a call of `restart_group`. No rank has failed."""


class Ranks(Protocol):
    """The ranks of one group: RankActors on Ray, RankProcesses without Ray. Each call may raise RankEnded."""

    group: str
    tp: int

    @property
    def is_running(self) -> bool: ...

    async def adopt_ranks(self) -> tuple[int | None, tuple[RankProgress, ...]]: ...

    async def find_nodes(self) -> bool: ...

    async def start_ranks(self, start_number: int, incarnation: int) -> None: ...

    async def read_previous_crash(self) -> str | None: ...

    async def run_ranks(self) -> None: ...

    async def wait_for_exit(self, seconds: float) -> None: ...

    async def read_progress(self) -> tuple[RankProgress, ...]: ...

    async def stop_ranks(self) -> None: ...

    def kill_ranks(self) -> None: ...


def backoff_seconds(failures: int) -> float:
    """Seconds to wait before the next start, after `failures` starts in a row that did not last."""
    return min(0.25 * 2.0**failures, _MAX_BACKOFF_SECONDS)


class GroupSupervisor:
    """Supervises one group. `state` is always current.

    `has_served`: whether the group served under a former supervisor. A group that has served is always restarted. A
    group that has never served stays "failed" if its first start fails.
    """

    def __init__(
        self,
        ranks: Ranks,
        poll_interval: PollInterval,
        *,
        has_served: bool,
        on_change: Callable[[], None],
        backoff: Callable[[int], float] = backoff_seconds,
    ) -> None:
        self.state = GroupState(ranks.group, ranks=(RankProgress(),) * ranks.tp)
        self._ranks = ranks
        self._poll_interval = poll_interval
        self._has_served = has_served
        self._on_change = on_change
        self._backoff = backoff
        self._restart_requested = False
        self._is_stopped = False
        self._check_requested = asyncio.Event()
        self._changed = asyncio.Event()

    async def adopt_group(self) -> None:
        """Take over the ranks that a former supervisor has started, if all of them serve; else kill them."""
        start_number, ranks = await self._ranks.adopt_ranks()
        if start_number is None:
            return
        if ranks:
            # The incarnation is stored nowhere, so the start number replaces it. If the ranks of an earlier start never
            # ran, the real incarnation is smaller. Then the next ranks do not find the crash records of these ranks.
            self.state = replace(
                self.state,
                state="serving",
                address=ranks[0].address,
                ranks=ranks,
                restarts=start_number,
                incarnation=start_number,
            )
            _log.info("%s is adopted", self.state.name)
        else:
            self.state = replace(self.state, restarts=start_number + 1, incarnation=start_number + 1)

    async def supervise_group(self) -> None:
        """Keep the group running until cancelled. Returns only if a group that has never served cannot start."""
        failures = 0
        while True:
            serving_since = math.inf
            try:
                if not self._ranks.is_running:
                    await self._start()
                self._has_served = True
                serving_since = time.monotonic()
                self._change(state="serving", address=self.state.ranks[0].address, reason="")
                await self._watch()
            except RankEnded as ended:
                failures = 0 if time.monotonic() - serving_since > _STABLE_SECONDS else failures + 1
                _log.error("%s is lost: %s", self.state.name, ended)
                # Inform routers first: until then they send requests to this group.
                why = str(ended)
                self._change(state="lost" if self._has_served else "failed", address="", reason=why, last_failure=why)
                was_running = self._ranks.is_running
                self._ranks.kill_ranks()
                if not self._has_served:
                    return
                await asyncio.sleep(self._backoff(failures))
                self._prepare_next_start(was_running)
            except RestartRequested:
                _log.info("%s is started again", self.state.name)
                self._change(state="lost", address="", reason=_RESTART_REQUESTED, last_failure=_BY_COMMAND)
                await self._ranks.stop_ranks()
                self._prepare_next_start(was_running=True)

    def drain_group(self) -> None:
        """Make routers send no new requests to the group. Running requests continue. A restart undoes this."""
        if self.state.state == "serving":
            self._change(state="draining")

    def undrain_group(self) -> None:
        """Make routers send new requests to the group again."""
        if self.state.state == "draining":
            self._change(state="serving")

    def check_now(self) -> None:
        """Check the ranks before the next check is due, if they serve."""
        self._check_requested.set()

    async def wait_until_serving(self) -> None:
        """Raises Unavailable if the group cannot start, or has no nodes now."""
        await self._wait_until(lambda: self.state.state in ("serving", "failed") or self._has_no_nodes)
        if self.state.state != "serving":
            raise Unavailable(f"{self.state.name} does not start: {self.state.reason}")

    async def restart_group(self) -> None:
        """End the ranks and start new ones. Requests that still run move to other groups.

        Returns once the new ranks serve. Raises Unavailable if the group does not serve now, if its nodes are gone, or
        if its next start fails (further starts follow).
        """
        before = self.state.restarts
        if self.state.state not in ("serving", "draining"):
            raise Unavailable(f"{self.state.name} is {self.state.state}: {self.state.reason or 'wait until it serves'}")
        self._restart_requested = True
        self.check_now()
        await self._wait_until(
            lambda: self.state.restarts != before and (self.state.state != "starting" or self._has_no_nodes)
        )
        if self.state.state != "serving":
            raise Unavailable(f"{self.state.name} does not start again: {self.state.reason}")

    async def wait_until_stopped(self) -> None:
        """Return once `stop_group` is called."""
        await self._wait_until(lambda: self._is_stopped)

    async def stop_group(self, *, now: bool) -> None:
        """End the ranks for good. `now`: kill them at once. Methods that wait for the group then raise Unavailable."""
        self._is_stopped = True
        self._changed.set()
        if now:
            self._ranks.kill_ranks()
        else:
            await self._ranks.stop_ranks()

    async def _start(self) -> None:
        """Start the ranks and wait until all serve. Raises RankEnded if one ends before that."""
        await self._wait_for_nodes()
        await self._ranks.start_ranks(self.state.restarts, self.state.incarnation)
        await self._read_previous_crash()
        await self._ranks.run_ranks()
        while not all(rank.phase is Phase.SERVING for rank in self.state.ranks):
            await self._ranks.wait_for_exit(_POLL_SECONDS)
            self.state = replace(self.state, ranks=await self._ranks.read_progress())

    async def _wait_for_nodes(self) -> None:
        while not await self._ranks.find_nodes():
            if not self.state.reason.startswith(_NO_NODES):
                _log.warning("%s waits for nodes", self.state.name)
                self._change(reason=f"{_NO_NODES}: Ray has no room for {self._ranks.tp} ranks now; is a node lost?")
            await asyncio.sleep(_NODE_SECONDS)

    async def _read_previous_crash(self) -> None:
        """Read how the former ranks ended. Routers need this to decide which requests may have crashed them."""
        if not self.state.incarnation:
            return
        crash = await self._ranks.read_previous_crash()
        if crash:
            _log.error("%s had ended by itself: %s", self.state.name, crash)
        failure = self.state.last_failure
        if crash and crash not in failure:
            failure += f"; {crash}"
        elif crash == "" and PROCESS_DIED in failure and not any(why in failure for why in (_KILLED, MEMORY_KILL)):
            failure += _KILLED
        self._change(previous_crash=crash, last_failure=failure)

    async def _watch(self) -> None:
        """Raises RankEnded when a rank ends or hangs, RestartRequested when `restart_group` is called.

        Calls every rank: a suspended process keeps its connections and is noticed only in this way.
        """
        self._restart_requested = False
        while not self._restart_requested:
            await self._wait_for_check()
            self.state = replace(self.state, ranks=await self._ranks.read_progress())
        raise RestartRequested

    async def _wait_for_check(self) -> None:
        """Wait until a check is due or requested. Raises RankEnded once a rank has ended."""
        waits = [
            asyncio.ensure_future(self._ranks.wait_for_exit(self._poll_interval.next_wait())),
            asyncio.ensure_future(self._check_requested.wait()),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
        self._check_requested.clear()

    def _prepare_next_start(self, was_running: bool) -> None:
        """Increase the start number, and the incarnation if the last ranks ran. Ranks that never ran served no request
        and left no record of a crash, so the records of the ranks before them are still needed."""
        incarnation = self.state.incarnation + was_running
        self._change(state="starting", restarts=self.state.restarts + 1, incarnation=incarnation, previous_crash=None)

    @property
    def _has_no_nodes(self) -> bool:
        """Whether the group waits for nodes. This may last for hours, and meanwhile no other change may wait for it."""
        return self.state.state == "starting" and self.state.reason.startswith(_NO_NODES)

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._is_stopped:
                raise Unavailable(f"{self.state.name} was removed meanwhile")
            self._changed.clear()
            await self._changed.wait()

    def _change(self, **changed: object) -> None:
        self.state = replace(self.state, **changed)  # type: ignore[arg-type]  # names and types are GroupState's
        if self.state.state not in ("serving", "draining"):
            self.state = replace(self.state, ranks=(RankProgress(),) * self._ranks.tp)
        self._changed.set()
        self._on_change()
