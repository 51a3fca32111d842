"""Line: where requests wait until a group has room for them, and are sent from in their turn.

A request goes straight through while nobody waits and some group has room for it. Placing and taking out of the queue
are one step, so that what one request takes of the room the next one sees. Of one tenant's, short prompts need not wait
for long ones: each is due some multiple of its own prompt's seconds after it came, and the first due is next; so nobody
is overtaken for ever, and whoever waits longest has the most to be done (the aim of Brinch Hansen's "highest response
ratio next", with an order that does not change).

A request for which no group has room is passed over, and holds up only those that could go to the same groups: of the
requests with equal `Eligible` only the first is tried at each move. It keeps its place, and is tried first when there
is room again. The caller of `placed` says how to place the request, which groups can take it, and how long its prompt
takes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from ..proto.errors import CoatcheckError, DeadlineExceeded, Overloaded
from .eligibility import Eligible
from .fair_queue import FairQueue, QueueStats, Served
from .placement import Placement
from .request import Request
from .tenant import Tenant

# To None while no group has room.
Place = Callable[[], Placement | None]
# Which groups can take the request, of those that serve now.
Eligibility = Callable[[], Eligible]
# Seconds that the prompt takes where it takes least; 0 while that is not known.
Seconds = Callable[[], float]
# Those that come within so many times a prompt's own seconds may overtake it.
_PATIENCE: Final = 20.0
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0
# A deadline is refused if twice the speed at which the line has moved would not meet it, once so many have left it.
_AT_BEST: Final = 2.0
_FEWEST_MOVED: Final = 8
_REMEMBERED: Final = 64  # places given, for the rate of them
_FIRST_ANSWER_TOKENS: Final = 64.0  # foreseen of an answer until some have ended
_ANSWERS_AVERAGED: Final = 32


class _Waiting:
    __slots__ = ("deadline", "eligibility", "eligible", "place", "placed", "since")

    def __init__(self, place: Place, eligibility: Eligibility, since: float, deadline: float | None) -> None:
        self.deadline = deadline
        self.eligibility = eligibility
        self.eligible = eligibility()
        self.place = place
        self.since = since
        self.placed: asyncio.Future[tuple[Placement, Served]] = asyncio.get_running_loop().create_future()


def due_at(came: float, seconds: float) -> float:
    """When a request is due whose prompt takes so long."""
    return came + _PATIENCE * seconds


class Line:
    """Holds at most `most` requests that no group has yet."""

    def __init__(self, most: int) -> None:
        self._queue: FairQueue[_Waiting] = FairQueue(most)
        self._given: deque[float] = deque(maxlen=_REMEMBERED)
        self._answer_tokens = _FIRST_ANSWER_TOKENS
        self._moved, self._formed = 0, 0.0  # places given since the line was last empty, and when that was
        self._last_wait = (0.0, 0.0)  # when, and how long the one that was placed then had waited

    def __len__(self) -> int:
        return len(self._queue)

    def stats(self) -> QueueStats:
        """Its counts."""
        return self._queue.stats()

    def queue_seconds(self, now: float) -> float:
        """How long requests wait now: of those like the next one (see FairQueue.oldest) whoever has waited longest, or
        whoever was placed last, if that is but a moment ago."""
        oldest = self._queue.oldest()
        when, waited = self._last_wait
        return max(now - oldest.since if oldest is not None else 0.0, waited if now - when < 1.0 else 0.0)

    def require_room(
        self, tenant: Tenant, priority: int, now: float, deadline: float | None, eligible: Eligible
    ) -> None:
        """Raises Overloaded where a request of this tenant would find no room in the queue, and DeadlineExceeded where
        its turn cannot come in time, before anything is done for it. Only requests that can go to the same groups (an
        equal `eligible`) count as ahead of it: others may be waiting for groups that it does not need."""
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
        self, request: Request, place: Place, eligibility: Eligibility, seconds: Seconds, *, bounded: bool = True
    ) -> tuple[Placement, Served]:
        """Waits for its turn and a place. Raises Overloaded when there is no room to wait, or others have more claim
        to it, and what `place` raises."""
        now = asyncio.get_running_loop().time()
        tokens = self._foreseen(request)
        if not len(self._queue) and (placement := place()) is not None:
            return placement, self._queue.pass_by(request.tenant, tokens)
        waiting = _Waiting(place, eligibility, now, request.deadline)
        if not len(self._queue):
            self._moved, self._formed = 0, now
        put = self._queue.put(
            waiting,
            request.tenant,
            priority=request.priority,
            tokens=tokens,
            due=due_at(now, seconds()),
            needs=waiting.eligible,
            bounded=bounded,
        )
        if put is None:
            raise self._full(now)
        id, displaced = put
        if displaced is not None and not displaced.placed.done():
            displaced.placed.set_exception(self._full(now))
        if self._queue.waiting(waiting.eligible) == 1 < len(self._queue):
            self.move()  # those that wait already wait for other groups
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            placed = waiting.placed
            if not self._queue.drop(id) and not placed.cancelled() and placed.exception() is None:
                placement, served = placed.result()  # just as its client went
                placement.close(finished=False)
                served.settle(0)
            self.move()  # somebody else may be next now, and fit where this one did not
            raise

    def regroup(self) -> None:
        """The groups that serve have changed: asks again which can take each waiting request, then as `move`."""

        def eligible(waiting: _Waiting) -> Eligible:
            waiting.eligible = waiting.eligibility()
            return waiting.eligible

        self._queue.regroup(eligible)
        self.move()

    def move(self) -> None:
        """Places waiting requests in their order, for as long as some group has room for one of them. At most one
        request of each different `Eligible` is tried in vain."""
        blocked: set[Hashable] = set()  # no group that could take these has room
        while (waiting := self._queue.peek(blocked)) is not None:
            now = asyncio.get_running_loop().time()
            try:
                if waiting.deadline is not None and now >= waiting.deadline:
                    raise DeadlineExceeded(f"its deadline came after {now - waiting.since:.1f} s in line")
                placement = waiting.place()
            except CoatcheckError as error:  # it fits none of the groups that there are by now
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
            if waiting.placed.done():  # its client goes just now
                placement.close(finished=False)
                served.settle(0)
            else:
                waiting.placed.set_result((placement, served))

    def ended(self, served: Served, computed: int, answered: int) -> None:
        """What a request took in the end: prompt tokens that no cache held, and those of its answer."""
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
        """How long those that wait will take, as places have been given lately."""
        if len(self._given) < 2:
            return _SHORTEST_RETRY
        rate = len(self._given) / max(now - self._given[0], 1e-3)
        return min(max(len(self._queue) / rate, _SHORTEST_RETRY), _LONGEST_RETRY)
