"""AdmissionQueue: the admission queue, in which requests wait until a group has room for them.

A request is placed at once while the queue is empty and some group has room. A request is placed and taken out of the
queue in one step, so the next one sees the room that is left. Within a tenant short prompts overtake long ones: a
request is due at its arrival + 20 × the seconds that its prompt takes to compute, and the first due is next. So none is
overtaken for ever, and waiting times are in proportion to the work (the aim of Brinch Hansen's "highest response ratio
next", with an order that does not change).

A request for which no group has room is passed over, and holds up only those that could go to the same groups: of the
requests with equal `EligibleGroups` only the first is tried at each move. It keeps its place, and is tried first when
there is room again. The caller of `placed` says how to place the request, which groups can take it, and how long its
prompt takes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from coatcheck.proto.errors import DeadlineExceeded, Overloaded
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.assignment import Assignment
from coatcheck.router.serving.fair_queue import FairQueue, QueueStats, Served

# Places the request; returns None while no group has room.
Place = Callable[[], Assignment | None]
# The groups that can take the request, of those that serve now.
FindEligible = Callable[[], EligibleGroups]
# Seconds that the prompt takes on the group that holds most of it; 0 while no group serves.
Seconds = Callable[[], float]
# A request may be overtaken by those that arrive within this multiple of its own prompt's seconds.
_PATIENCE: Final = 20.0
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0
# A deadline is refused if the queue would have to move more than _AT_BEST times as fast as it has moved to meet it;
# checked once _FEWEST_MOVED requests have left the queue.
_AT_BEST: Final = 2.0
_FEWEST_MOVED: Final = 8
_REMEMBERED: Final = 64  # placements, from which their rate is computed
_FIRST_ANSWER_TOKENS: Final = 64.0  # estimate of an answer's length before any has ended
_ANSWERS_AVERAGED: Final = 32


class _Waiting:
    __slots__ = ("deadline", "eligible", "find_eligible", "place", "placed", "since")

    def __init__(self, place: Place, find_eligible: FindEligible, since: float, deadline: float | None) -> None:
        self.deadline = deadline
        self.find_eligible = find_eligible
        self.eligible = find_eligible()
        self.place = place
        self.since = since
        self.placed: asyncio.Future[tuple[Assignment, Served]] = asyncio.get_running_loop().create_future()


def due_at(came: float, seconds: float) -> float:
    """The due time of a request: `came` is its arrival, `seconds` what its prompt takes to compute."""
    return came + _PATIENCE * seconds


class AdmissionQueue:
    """Holds at most `most` requests, not counting those put in with `bounded=False`."""

    def __init__(self, most: int) -> None:
        self._queue: FairQueue[_Waiting] = FairQueue(most)
        self._given: deque[float] = deque(maxlen=_REMEMBERED)
        self._answer_tokens = _FIRST_ANSWER_TOKENS
        self._moved, self._formed = 0, 0.0  # requests placed since the queue was last empty, and when that was
        self._last_wait = (0.0, 0.0)  # of the request placed last: when, and how long it had waited

    def __len__(self) -> int:
        return len(self._queue)

    def stats(self) -> QueueStats:
        """The counts for status and metrics."""
        return self._queue.stats()

    def queue_seconds(self, now: float) -> float:
        """How long requests wait now: the age of the oldest one (see FairQueue.oldest), or the wait of the request
        placed last if that was within the last second; the larger of both."""
        oldest = self._queue.oldest()
        when, waited = self._last_wait
        return max(now - oldest.since if oldest is not None else 0.0, waited if now - when < 1.0 else 0.0)

    def require_room(
        self, tenant: Tenant, priority: int, now: float, deadline: float | None, eligible: EligibleGroups
    ) -> None:
        """Checks a request before any work is done for it. Raises Overloaded if the queue has no room for this tenant,
        and DeadlineExceeded if its turn cannot come in time. Only requests that can go to the same groups (an equal
        `eligible`) count as ahead of it, since others may wait for groups that it does not need."""
        if not len(self._queue):
            return
        if not self._queue.has_room(tenant, priority):
            raise self._full(now)
        if deadline is None or self._moved < _FEWEST_MOVED:
            return
        ahead = self._queue.ahead(tenant, priority, now, eligible)
        seconds = ahead * (now - self._formed) / self._moved
        if now + seconds / _AT_BEST > deadline:
            raise DeadlineExceeded(
                f"{ahead} requests wait before it, which takes about {seconds:.1f} s, and its deadline is in "
                f"{max(deadline - now, 0.0):.1f} s; allow more time, or try again later"
            )

    async def placed(
        self, request: Request, place: Place, find_eligible: FindEligible, seconds: Seconds, *, bounded: bool = True
    ) -> tuple[Assignment, Served]:
        """Waits until the request is placed. Raises Overloaded if the queue has no room or the request is displaced,
        and whatever `place` raises."""
        now = asyncio.get_running_loop().time()
        tokens = self._foreseen(request)
        if not len(self._queue) and (placement := place()) is not None:
            return placement, self._queue.pass_by(request.tenant, tokens)
        waiting = _Waiting(place, find_eligible, now, request.deadline)
        if not len(self._queue):
            self._moved, self._formed = 0, now
        put = self._queue.put(
            waiting,
            request.tenant,
            priority=request.priority,
            tokens=tokens,
            due=due_at(now, seconds()),
            scheduling_class=waiting.eligible,
            bounded=bounded,
        )
        if put is None:
            raise self._full(now)
        id, displaced = put
        if displaced is not None and not displaced.placed.done():
            displaced.placed.set_exception(self._full(now))
        if self._queue.waiting(waiting.eligible) == 1 < len(self._queue):
            self.move()  # the only one of its class: the groups that it can take may have room now
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            placed = waiting.placed
            if not self._queue.drop(id) and not placed.cancelled() and placed.exception() is None:
                placement, served = placed.result()  # placed at the moment when its client went away
                placement.close(finished=False)
                served.settle(0)
            self.move()  # another request may be next now, and may fit where this one did not
            raise

    def reclassify(self) -> None:
        """To be called when the groups that serve have changed: updates the eligible groups of each waiting request,
        then moves."""

        def eligible(waiting: _Waiting) -> EligibleGroups:
            waiting.eligible = waiting.find_eligible()
            return waiting.eligible

        self._queue.reclassify(eligible)
        self.move()

    def move(self) -> None:
        """Places waiting requests in their order until no group has room for any of them. At most one request of each
        scheduling class (its `EligibleGroups`) is tried in vain."""
        blocked: set[Hashable] = set()  # no group that could take these has room
        while (waiting := self._queue.peek(blocked)) is not None:
            now = asyncio.get_running_loop().time()
            try:
                if waiting.deadline is not None and now >= waiting.deadline:
                    raise DeadlineExceeded(f"its deadline came after {now - waiting.since:.1f} s in line")
                placement = waiting.place()
            # A CoatcheckError says, for example, that no group can ever hold the request. Any other error is a fault of
            # ours: the request that meets it fails, and the group whose message led to this move does not.
            except Exception as error:
                self._queue.take(blocked)[1].settle(0)
                if not waiting.placed.done():
                    waiting.placed.set_exception(error)
                continue
            if placement is None:
                blocked.add(waiting.eligible)
                continue
            _, served = self._queue.take(blocked)
            self._moved += 1
            self._given.append(now)
            self._last_wait = (now, now - waiting.since)
            if waiting.placed.done():  # its client has just gone away
                placement.close(finished=False)
                served.settle(0)
            else:
                waiting.placed.set_result((placement, served))

    def ended(self, served: Served, computed: int, answered: int) -> None:
        """Settles what a request is charged. `computed`: prompt tokens that no cache held; `answered`: tokens of the
        answer."""
        served.settle(computed + answered)
        self._answer_tokens += (answered - self._answer_tokens) / _ANSWERS_AVERAGED

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self._queue.check()

    def _foreseen(self, request: Request) -> float:
        most = float((request.sampling.max_tokens or 1) * request.sampling.n)
        return len(request.prompt_token_ids) + min(most, self._answer_tokens)

    def _full(self, now: float) -> Overloaded:
        return Overloaded(
            f"no group has room, and {len(self._queue)} requests wait already, as many as may; try again later",
            self._retry_seconds(now),
        )

    def _retry_seconds(self, now: float) -> float:
        """Estimated seconds until the queue is empty, from the rate at which requests were placed lately."""
        if len(self._given) < 2:
            return _SHORTEST_RETRY
        rate = len(self._given) / max(now - self._given[0], 1e-3)
        return min(max(len(self._queue) / rate, _SHORTEST_RETRY), _LONGEST_RETRY)
