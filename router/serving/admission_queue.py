"""AdmissionQueue: requests that wait in the router until a group has room for them.

The Dispatcher adds a request and awaits its grant. Whenever a group may have room, the Dispatcher sends the next
request (`peek`) and grants it. A request is sent and leaves the queue in one step, so the group's load includes it when
the next request is considered.

Within a tenant short prompts overtake long ones: a request is due at its arrival + 20 × the seconds that its prompt
takes to compute, and the request that is due first is next. So no request starves, and waiting times are
in proportion to the work (the aim of Brinch Hansen's "highest response ratio next", with an order that does not
change).

A request for which no group has room is skipped, and holds up only the requests that could go to the same groups: of
the requests with equal `EligibleGroups` only the first is tried. A skipped request keeps its place.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from coatcheck.proto.errors import DeadlineExceeded, Overloaded
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.routing.routing_cost import GUESSED_ANSWER_TOKENS
from coatcheck.router.serving.fair_queue import FairQueue, QueueEntry, QueueFull, TokenCharge
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle

# A request may be overtaken by requests that arrive within _PATIENCE times the seconds that its own prompt takes.
_PATIENCE: Final = 20.0
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0
# A request is refused if, to meet its deadline, the queue would have to move more than _MAX_SPEEDUP times as fast as it
# has moved so far. Checked once _MIN_GRANTS requests have left the queue.
_MAX_SPEEDUP: Final = 2.0
_MIN_GRANTS: Final = 8
_MAX_GRANTS: Final = 64  # last grants, from which the rate of grants is computed
ANSWERS_AVERAGED: Final = 32  # answers that the running average of their tokens covers


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request as it is sent to its next group. `moves`: how many groups the request has lost; `attempt` on the
    wire. `delivered`: the output tokens that the client has, by choice.

    `group_kind`: that of the group that has computed these tokens (see group_kind); only groups of this kind can
    continue the request. b"" if any group may run it. `suspicion`: see PoisonSuspicion.level.
    `returns`: how often groups have returned the request (see Submit.max_queued_tokens).
    """

    request: Request
    lifecycle: RequestLifecycle
    moves: int = 0
    delivered: Mapping[int, Sequence[int]] = field(default_factory=dict)
    group_kind: bytes = b""
    suspicion: int = 0
    returns: int = 0


class Grant(NamedTuple):
    """A request that was sent to a group, and what its tenant is charged for it."""

    submission: Submission
    charge: TokenCharge


@dataclass(eq=False, kw_only=True)
class QueuedAttempt(QueueEntry):
    """One waiting request; its `scheduling_class` is its EligibleGroups. Await `grant`; it raises the error of a
    request that cannot be sent."""

    attempt: Attempt
    since: float
    grant: asyncio.Future[Grant] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def deadline_error(self) -> DeadlineExceeded:
        """The error of a request whose deadline has passed while it waited."""
        waited = asyncio.get_running_loop().time() - self.since
        return DeadlineExceeded(f"the deadline passed after {waited:.1f} s in the queue")


def due_at(arrival: float, prompt_seconds: float) -> float:
    """When a request is due whose prompt takes `prompt_seconds` to compute."""
    return arrival + _PATIENCE * prompt_seconds


class AdmissionQueue:
    """At most `max_size` requests wait; only those added with `bounded=False` may exceed this."""

    def __init__(self, max_size: int) -> None:
        self._queue: FairQueue[QueuedAttempt] = FairQueue(max_size)
        # The time when the queue last became non-empty, then the times of its grants; the last ones of these.
        self._grant_times: deque[float] = deque(maxlen=1 + _MAX_GRANTS)
        self._answer_tokens = GUESSED_ANSWER_TOKENS
        self._last_wait = (0.0, 0.0)  # (time of the last grant, seconds that the request had waited)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def answer_tokens(self) -> float:
        """Mean tokens of the last answers."""
        return self._answer_tokens

    def queue_seconds(self, now: float) -> float:
        """How long requests wait now: the larger of the age of the oldest request (see FairQueue.oldest) and the wait
        of the last granted one, if it was granted within the last second."""
        oldest = self._queue.oldest()
        when, waited = self._last_wait
        return max(now - oldest.since if oldest is not None else 0.0, waited if now - when < 1.0 else 0.0)

    def require_room(
        self, tenant: Tenant, priority: int, now: float, deadline: float | None, scheduling_class: EligibleGroups
    ) -> None:
        """Checks a request before any work is done for it. Raises Overloaded if the queue has no room for this tenant,
        and DeadlineExceeded if the request cannot be next in time. Only requests with an equal `scheduling_class`
        count as ahead of the request, since others may wait for groups that it does not need."""
        if not len(self._queue):
            return
        if not self._queue.has_room(tenant, priority):
            raise self._full(now)
        if deadline is None or len(self._grant_times) <= _MIN_GRANTS:
            return
        ahead = self._queue.count_ahead(tenant, priority, now, scheduling_class)
        seconds = ahead * self._seconds_per_grant(now)
        if now + seconds / _MAX_SPEEDUP > deadline:
            raise DeadlineExceeded(
                f"{ahead} requests wait before this one, for about {seconds:.1f} s, and its deadline is in "
                f"{max(deadline - now, 0.0):.1f} s; allow more time, or try again later"
            )

    def grant_unqueued(self, submission: Submission, request: Request) -> Grant:
        """The grant of a request that was sent without waiting, while the queue was empty."""
        return Grant(submission, self._queue.charge_unqueued(request.tenant, self._expected_tokens(request)))

    def add(
        self, attempt: Attempt, scheduling_class: EligibleGroups, prompt_seconds: float, *, bounded: bool = True
    ) -> QueuedAttempt:
        """Adds a request. `prompt_seconds`: how long its prompt takes on the group that computes it in the least
        time. `bounded`: False adds the request even if the queue is full. Raises Overloaded if there is no room."""
        now = asyncio.get_running_loop().time()
        if not len(self._queue):
            self._grant_times.clear()
            self._grant_times.append(now)
        queued = QueuedAttempt(
            tenant=attempt.request.tenant,
            priority=attempt.request.priority,
            tokens=self._expected_tokens(attempt.request),
            due=due_at(now, prompt_seconds),
            scheduling_class=scheduling_class,
            attempt=attempt,
            since=now,
        )
        try:
            displaced = self._queue.add(queued, bounded=bounded)
        except QueueFull:
            raise self._full(now) from None
        if displaced is not None and not displaced.grant.done():
            displaced.grant.set_exception(self._full(now))
        return queued

    def waiting_in_class(self, scheduling_class: Hashable) -> int:
        """Number of waiting requests with these EligibleGroups."""
        return self._queue.waiting_in_class(scheduling_class)

    @property
    def classes(self) -> list[EligibleGroups]:
        """The different EligibleGroups of the waiting requests."""
        return [one for one in self._queue.classes if isinstance(one, EligibleGroups)]

    def peek(self, blocked: AbstractSet[Hashable]) -> QueuedAttempt | None:
        """The next request, leaving out those whose EligibleGroups are `blocked`; None if there is none."""
        return self._queue.peek(blocked)

    def grant(self, submission: Submission, blocked: AbstractSet[Hashable]) -> None:
        """Removes the request that `peek(blocked)` returns, which was sent as `submission`, and sets its grant."""
        queued, charge = self._queue.pop(blocked)
        now = asyncio.get_running_loop().time()
        self._grant_times.append(now)
        self._last_wait = (now, now - queued.since)
        if queued.grant.done():  # its client has just disconnected
            _cancel_grant(Grant(submission, charge))
        else:
            queued.grant.set_result(Grant(submission, charge))

    def refuse(self, error: Exception, blocked: AbstractSet[Hashable]) -> None:
        """Removes the request that `peek(blocked)` returns, which fails with `error`."""
        queued, charge = self._queue.pop(blocked)
        charge.settle_tokens(0)
        if not queued.grant.done():
            queued.grant.set_exception(error)

    def withdraw(self, queued: QueuedAttempt) -> None:
        """Removes a request whose client has disconnected. If the request was granted at the same moment, its
        submission is closed."""
        grant = queued.grant
        if not self._queue.remove(queued) and not grant.cancelled() and grant.exception() is None:
            _cancel_grant(grant.result())

    def reclassify(self, find_class: Callable[[Attempt], EligibleGroups]) -> None:
        """Finds the EligibleGroups of each waiting request again. Called when the serving groups have changed."""
        self._queue.reclassify(lambda queued: find_class(queued.attempt))

    def settle_charge(self, charge: TokenCharge, computed: int, answered: int) -> None:
        """Settles the charge of a granted request that has ended. `computed`: prompt tokens that no cache held;
        `answered`: tokens of its answer."""
        charge.settle_tokens(computed + answered)
        self._answer_tokens += (answered - self._answer_tokens) / ANSWERS_AVERAGED

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self._queue.check()

    def _expected_tokens(self, request: Request) -> float:
        max_answer = float((request.sampling.max_tokens or 1) * request.sampling.n)
        return len(request.prompt_token_ids) + min(max_answer, self._answer_tokens)

    def _full(self, now: float) -> Overloaded:
        return Overloaded(
            f"no group has room, and the queue is full with {len(self._queue)} requests; try again later",
            self._retry_seconds(now),
        )

    def _retry_seconds(self, now: float) -> float:
        """Estimated seconds until the queue is empty."""
        if len(self._grant_times) < 2:
            return _SHORTEST_RETRY
        return min(max(len(self._queue) * self._seconds_per_grant(now), _SHORTEST_RETRY), _LONGEST_RETRY)

    def _seconds_per_grant(self, now: float) -> float:
        """Mean seconds from one grant to the next, over the last grants. There must have been one."""
        return (now - self._grant_times[0]) / (len(self._grant_times) - 1)


def _cancel_grant(grant: Grant) -> None:
    grant.submission.close(finished=False)
    grant.charge.settle_tokens(0)
