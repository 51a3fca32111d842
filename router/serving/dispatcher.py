"""Dispatcher: sends requests to groups, each to the group with the least cost that can hold it.

New requests wait in the admission queue until a group has room. A request that has lost its group is sent again at
once, past the queue, to a group that can continue it. A request that may have crashed its group is a suspect, and waits
until it may run on a group beside the other suspects there (see poison_suspicion.py).
"""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from coatcheck.proto.errors import Unavailable
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups, ServingGroups, require_deadline
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.groups.submission import Submission
from coatcheck.router.routing.prefix_replication import PrefixReplication
from coatcheck.router.routing.routing_cost import PREFIX_AWARE, Decision, choose_group
from coatcheck.router.routing.routing_policy import apply_policy
from coatcheck.router.serving.admission_queue import AdmissionQueue, Attempt, Grant, QueuedAttempt
from coatcheck.router.serving.explanation import DryRun
from coatcheck.router.serving.poison_suspicion import groups_for_suspect

_NO_GROUP = "no worker group is serving; try again shortly"
_NO_OTHER_GROUP = "its worker group is lost, and no group that could continue it is serving; try again shortly"
# The group that gets a request after this many returns keeps it. See bench/LOG.md for 1, 2, 3 and 8.
_MAX_RETURNS: Final = 3


class Dispatcher:
    """`admit` sends requests in the order of the admission queue, `send` past the queue. One for each router.

    `policy`: a name of `serve --routing` (see apply_policy). `no_group_seconds`: how long queued requests wait while no
    serving group can run them. `serving`: the groups that take new requests.
    """

    def __init__(
        self,
        groups: GroupRegistry,
        queue: AdmissionQueue,
        policy: str = PREFIX_AWARE,
        no_group_seconds: float = math.inf,
    ) -> None:
        self.queue = queue
        self.retries = RetryBudget()
        self.serving = ServingGroups(groups.serving())
        self._groups = groups
        self._rng = random.Random()
        self._replication = PrefixReplication()
        self._policy = policy
        self._last_group = ""  # where the last request was sent
        self._no_group_seconds = no_group_seconds
        self._no_group_timer: asyncio.TimerHandle | None = None  # runs while a request waits that no group can run
        # Only one suspect of each level and kind of group looks for a group at a time, because many wait after a crash.
        self._suspect_turns: defaultdict[Hashable, asyncio.Lock] = defaultdict(asyncio.Lock)
        groups.on_room = self._send_if_room_gained
        groups.on_groups_changed = self.update_serving

    def require_room(self, tenant: Tenant, priority: int, deadline: float | None) -> None:
        """As AdmissionQueue.require_room, but before the prompt is known: assumes that every group can hold the
        prompt."""
        if len(self.queue):
            now = asyncio.get_running_loop().time()
            self.queue.require_room(tenant, priority, now, deadline, self.serving.eligible())

    async def admit(self, attempt: Attempt, *, wait_seconds: float = 0.0, bounded: bool = True) -> Grant:
        """Sends a request once it is next in the queue and a group has room for it.

        While no group serves, a new request waits `wait_seconds` for one, whether others are queued or not. A queued
        request waits until a group has room, its deadline has passed, or no group has served for too long. `bounded`:
        False, for a request that was admitted before, queues it even if the queue is full or no group serves. Raises
        Overloaded, DeadlineExceeded, Unavailable and ContextLengthExceeded.
        """
        if bounded and not self.serving.groups:
            await self._wait_for_group(wait_seconds)
        if not len(self.queue) and (submission := self._send_if_room(attempt)) is not None:
            return self.queue.grant_unqueued(submission, attempt.request)
        scheduling_class, prompt_seconds = self._scheduling_class(attempt), self._prompt_seconds(attempt)
        queued = self.queue.add(attempt, scheduling_class, prompt_seconds, bounded=bounded)
        self._limit_wait_without_groups()
        is_alone_in_class = self.queue.waiting_in_class(scheduling_class) == 1
        if is_alone_in_class and len(self.queue) > 1:  # its groups may have room; a queue of one was tried above
            self.send_waiting()
        try:
            async with asyncio.timeout_at(attempt.request.deadline):
                return await queued.grant
        except (asyncio.CancelledError, TimeoutError) as error:
            self.queue.withdraw(queued)
            self.send_waiting()  # the request that is next now may fit where this one did not
            if isinstance(error, TimeoutError):
                raise queued.deadline_error() from None
            raise

    def send_waiting(self) -> None:
        """Sends waiting requests in order until no group has room for any of them. Of the requests with equal
        EligibleGroups, at most one is tried without success."""
        blocked: set[Hashable] = set()  # EligibleGroups of which none has room
        while (queued := self.queue.peek(blocked)) is not None:
            try:
                submission = self._send_queued(queued)
            # The error, for example that no group can hold the request, fails this request. Raised from here, it would
            # end the stream of the group whose load report led to this call.
            except Exception as error:
                self.queue.refuse(error, blocked)
                continue
            if submission is None:
                blocked.add(queued.scheduling_class)
            else:
                self.queue.grant(submission, blocked)

    async def send(
        self, attempt: Attempt, *, wait_seconds: float = 0.0, exclude_groups: AbstractSet[str] = frozenset()
    ) -> Submission:
        """Sends a request at once, whether a group has room or not. Groups in `exclude_groups` are used only if there
        is no other. Raises Unavailable if no group can take the request within `wait_seconds`, and
        ContextLengthExceeded if no serving group can hold a request that no group has had before."""
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    change = self._groups.next_change
                    eligible = self._require_eligible_groups(attempt)
                    if not len(eligible):
                        await change.wait()
                    elif not attempt.suspicion:
                        return self._send(attempt, eligible, _preferred(eligible, exclude_groups))
                    elif (submission := await self._send_suspect(attempt, exclude_groups)) is not None:
                        return submission
        except TimeoutError:
            raise _no_group_error(attempt) from None

    def explain(self, request: Request) -> DryRun:
        """The group that the policy chooses now, and the cost of each group; nothing is sent. No further copy of a
        prefix is considered. Raises Unavailable and ContextLengthExceeded."""
        if not self.serving.groups:
            raise Unavailable(_NO_GROUP)
        eligible, loads = self.serving.require_eligible(request), self._groups.loads
        is_full = loads.is_full[eligible.slots]
        waits = not loads.has_room[eligible.slots].any()
        if not is_full.any():
            return DryRun(self._decide(request, eligible, eligible), waits=waits)
        whole = self._decide(request, eligible, eligible)
        full = [(whole.table.row(n), eligible.groups[n].load.full_reason) for n in np.flatnonzero(is_full).tolist()]
        if is_full.all():
            return DryRun(whole, full, waits=True)
        return DryRun(self._decide(request, eligible.only(~is_full), eligible), full, waits=waits)

    def update_serving(self) -> None:
        """Finds the EligibleGroups of each waiting request again, then sends. Called when the serving groups change."""
        self.serving = ServingGroups(self._groups.serving())
        self.queue.reclassify(self._scheduling_class)
        self.send_waiting()
        self._limit_wait_without_groups()

    def _limit_wait_without_groups(self) -> None:
        """Starts or stops the timer that refuses waiting requests if no serving group can run them for too long."""
        if all(map(len, self.queue.classes)):
            if self._no_group_timer is not None:
                self._no_group_timer.cancel()
                self._no_group_timer = None
        elif self._no_group_timer is None and self._no_group_seconds < math.inf:
            loop = asyncio.get_running_loop()
            self._no_group_timer = loop.call_later(self._no_group_seconds, self._refuse_waiting)

    def _refuse_waiting(self) -> None:
        self._no_group_timer = None
        with_groups = {eligible for eligible in self.queue.classes if len(eligible)}
        while (queued := self.queue.peek(with_groups)) is not None:
            self.queue.refuse(_no_group_error(queued.attempt), with_groups)

    def _send_if_room_gained(self) -> None:
        """Called when a group may have got room. While no group gains room, no waiting request can be sent."""
        if len(self.queue) and self._groups.loads.gained_room:
            self._groups.loads.gained_room = False
            self.send_waiting()

    async def _wait_for_group(self, wait_seconds: float) -> None:
        try:
            async with asyncio.timeout(wait_seconds):
                while not self.serving.groups:
                    await self._groups.next_change.wait()
        except TimeoutError:
            raise Unavailable(_NO_GROUP) from None

    async def _send_suspect(self, attempt: Attempt, exclude_groups: AbstractSet[str]) -> Submission | None:
        """Sends a suspect once it may run on some group; returns None if no serving group can continue the request."""
        async with self._suspect_turns[attempt.suspicion, attempt.group_kind]:
            while True:
                change = self._groups.next_change
                eligible = self._require_eligible_groups(attempt)
                suspicions = [(group, group.submissions.suspicion) for group in eligible.groups]
                free = EligibleGroups(groups_for_suspect(attempt.suspicion, suspicions))
                if len(free):
                    return self._send(attempt, eligible, _preferred(free, exclude_groups))
                if not len(eligible):
                    return None
                await change.wait()

    def _send_queued(self, queued: QueuedAttempt) -> Submission | None:
        deadline, now = queued.attempt.request.deadline, asyncio.get_running_loop().time()
        if deadline is not None and now >= deadline:
            raise queued.deadline_error()
        return self._send_if_room(queued.attempt)

    def _send_if_room(self, attempt: Attempt) -> Submission | None:
        eligible, loads = self._require_eligible_groups(attempt), self._groups.loads
        if not loads.has_room[eligible.slots].any():
            return None
        is_full = loads.is_full[eligible.slots]
        return self._send(attempt, eligible, eligible.only(~is_full) if is_full.any() else eligible)

    def _send(self, attempt: Attempt, eligible: EligibleGroups, preferred: EligibleGroups) -> Submission:
        """Sends to one of `preferred`, which are some of `eligible`, the request's class in the queue."""
        attempt.lifecycle.record_routing()
        decision = self._route(attempt, preferred, eligible)
        self._last_group = decision.group
        attempt.lifecycle.record_sent(decision, attempt.moves)
        submission = preferred.groups[decision.index].submit(
            attempt.request,
            decision.keep_cheapest(),
            attempt.moves,
            attempt.delivered,
            attempt.lifecycle.trace_context,
            may_return=not (attempt.moves or attempt.group_kind) and attempt.returns < _MAX_RETURNS,
        )
        submission.suspicion = attempt.suspicion
        return submission

    def _route(self, attempt: Attempt, preferred: EligibleGroups, eligible: EligibleGroups) -> Decision:
        """The group of `preferred` to which the request is sent. Raises DeadlineExceeded for a request without output
        that no group can answer in time."""
        request = attempt.request
        decision = self._decide(request, preferred, eligible)
        if not attempt.moves and not attempt.delivered:
            require_deadline(request, decision, asyncio.get_running_loop().time())
        if request.deadline is None and self._policy == PREFIX_AWARE:  # to compute a copy takes the request longer
            model = preferred.groups[decision.index].model
            decision = self._replication.consider_copy(decision, request.block_hashes(model), model.block_size)
        return decision

    def _require_eligible_groups(self, attempt: Attempt) -> EligibleGroups:
        """The groups that can run the request now. If groups serve and none can hold the request: none for a request
        that has lost its group, since that group may come back; else raises ContextLengthExceeded."""
        if attempt.moves or attempt.group_kind:
            return self._scheduling_class(attempt)
        return self.serving.require_eligible(attempt.request)

    def _scheduling_class(self, attempt: Attempt) -> EligibleGroups:
        return self.serving.eligible(attempt.request.max_len, attempt.group_kind)

    def _prompt_seconds(self, attempt: Attempt) -> float:
        """Seconds that the prompt takes on the group that computes it in the least time; 0 while no group serves."""
        eligible = self._require_eligible_groups(attempt)
        if not len(eligible):
            return 0.0
        costs = self._decide(attempt.request, eligible, eligible).table
        return float((costs.prefill_seconds + costs.restore_seconds).min())

    def _decide(self, request: Request, groups: EligibleGroups, scheduling_class: EligibleGroups) -> Decision:
        """The choice of the policy among `groups`. Requests of `scheduling_class` that wait raise the cost."""
        tokens = np.zeros((3, len(groups)))  # on device, on host, expected
        if request.sampling.prompt_logprobs is None:  # else the whole prompt is computed, whatever is cached
            for model, indices in groups.models:
                matches = np.array(self._groups.index.match(request.block_hashes(model)))
                held = matches.take(groups.slots[indices], axis=1) * model.block_size
                if len(indices) == len(groups):
                    tokens = held
                else:
                    tokens[:, indices] = held
        candidates = self._groups.loads.candidates(groups.names, groups.slots, *tokens)
        decision = choose_group(
            candidates,
            len(request.prompt_token_ids),
            self._rng,
            queued_in_router=self.queue.waiting_in_class(scheduling_class),
            answer_tokens=self.queue.answer_tokens,
            session=request.session_id,
        )
        return apply_policy(self._policy, decision, candidates, self._last_group, self._rng)


def _no_group_error(attempt: Attempt) -> Unavailable:
    return Unavailable(_NO_OTHER_GROUP if attempt.moves or attempt.group_kind else _NO_GROUP)


def _preferred(groups: EligibleGroups, exclude: AbstractSet[str]) -> EligibleGroups:
    """The groups that are not in `exclude`, or all if there is no other."""
    keep = np.array([group.name not in exclude for group in groups.groups])
    return groups if keep.all() or not keep.any() else groups.only(keep)
