"""SimulatedRouter: routes to simulated groups by our own choose_group() or by a published rule.

Ours keeps requests in its own queue while no group has room, and sees what a router sees when it serves: load reports,
events, and the requests that it has sent itself. A published rule places each request when it comes, or, with
`queued`, gets our queue, our gate for groups without room, and the blocks that groups are computing. In both cases it
sees the true state of every group.

Of several routers each gets a request at random, as clients that connect to any of them. Each router gets the reports
and events of every group, knows only the requests that it has sent itself, and has a queue of its own. A published rule
runs in each router anew: what it remembers, such as round robin's turn, is of the requests of one router.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from coatcheck.bench.routing_simulation.rules import CachedPrefix, Rule
from coatcheck.bench.routing_simulation.service_model import BLOCK, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_index import NO_MATCH, ExpectedHolders, PrefixMatch, match_prefix
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.access.tenant import ANONYMOUS
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.routing.prefix_replication import PrefixReplication
from coatcheck.router.routing.routing_cost import GUESSED_ANSWER_TOKENS, Decision, choose_group
from coatcheck.router.serving.admission_queue import ANSWERS_AVERAGED, due_at
from coatcheck.router.serving.fair_queue import FairQueue, QueueEntry

T = TypeVar("T")
_MAX_RETURNS = 3  # as in router/serving/dispatcher.py
# Requests that are sent now, and the group of each.
Placed = Iterator[tuple[SimulatedRequest, SimulatedGroup]]


class SimulatedRouter:
    """`add_request` in order of arrival; `send_queued` when a group may have room; `update` after each step.

    `make_rule`: makes the rule of each router; None is our own choose_group(). `serving`: names of the groups that take
    requests; the caller may change it.
    """

    def __init__(
        self,
        groups: Sequence[SimulatedGroup],
        make_rule: Callable[[], Rule] | None,
        rng: random.Random,
        routers: int = 1,
        *,
        queued: bool = True,
    ) -> None:
        self.serving = {group.name for group in groups}
        self._groups = groups
        self._rng = rng
        rules = [make_rule() if make_rule is not None else None for _ in range(routers)]
        # A published rule without our queue sees the groups themselves, and needs no view of them.
        self._rules = [] if queued else [rule for rule in rules if rule is not None]
        self._views = [] if self._rules else [_View(groups, self.serving, rule, rng) for rule in rules]

    def add_request(self, job: SimulatedRequest) -> Placed:
        """Send a request, or queue it if no group has room."""
        if self._views:
            yield from self._one_of(self._views).add_request(job)
        else:
            serving = [group for group in self._groups if group.name in self.serving]
            rule = self._one_of(self._rules)
            group = rule(job, serving, CachedPrefix(job.chain, self._groups), job.at, self._rng)
            job.group = group.name
            yield job, group

    def send_queued(self, now: float) -> Placed:
        """Send queued requests while groups have room."""
        for view in self._views:
            yield from view.send_queued(now)

    def _one_of(self, routers: Sequence[T]) -> T:
        return routers[0] if len(routers) == 1 else self._rng.choice(routers)

    @property
    def waiting(self) -> int:
        """Queued requests of all routers."""
        return sum([len(view.queue) for view in self._views])

    def update(self, group: SimulatedGroup) -> None:
        """Take the group's first tokens and ended requests."""
        for view in self._views:
            for job in group.started:
                view.record_first_token(job)
            for job in group.finished:
                view.record_end(job)
        group.started.clear()
        group.finished.clear()

    def check(self) -> None:
        """Raises AssertionError if a router expects a prefill after all requests have ended."""
        for view in self._views:
            view.queue.check()
            assert not len(view.expected), "an answered prompt is still expected"


@dataclass(eq=False, kw_only=True)
class _QueuedRequest(QueueEntry):
    request: SimulatedRequest


class _View:
    """One router: what it knows of the groups, and its queue."""

    def __init__(
        self, groups: Sequence[SimulatedGroup], serving: set[str], rule: Rule | None, rng: random.Random
    ) -> None:
        self._serving = serving
        self._rule = rule
        self._holders = groups[0].holders
        self.expected = ExpectedHolders()
        self._names = {group.bit: group.name for group in groups}
        self._all = sum(self._names)  # the set of all groups
        self._replication = PrefixReplication()
        self._answer_tokens = GUESSED_ANSWER_TOKENS
        self.queue: FairQueue[_QueuedRequest] = FairQueue(1 << 30)  # nothing is refused
        self._groups = {group.name: group for group in groups}
        self._rng = rng
        self._table = LoadTable()
        self._loads: dict[str, GroupLoad] = {}
        self._reports_read = dict.fromkeys(self._groups, 0)
        self._period = groups[0].model.report_seconds
        self._sent: dict[int, int] = {}  # id of a request -> its number in its group's load
        # Times of the submissions that no report contains yet, and the number of submissions in the last report.
        self._sent_at: dict[str, deque[float]] = {group.name: deque() for group in groups}
        self._reported = dict.fromkeys(self._groups, 0)
        for slot, group in enumerate(groups):
            most = group.model
            registration = Registration(
                model=GetModelResponse(block_size=BLOCK),
                num_blocks=most.blocks,
                max_batch_tokens=most.chunk,
                max_num_seqs=most.max_sequences,
            )
            self._loads[group.name] = GroupLoad(registration, self._table, slot)
            group.is_watched = True

    def add_request(self, job: SimulatedRequest) -> Placed:
        self._read_reports(job.at)
        if not len(self.queue) and self._has_room:
            yield self._place(job, job.at)
        else:
            due = due_at(job.at, self._prompt_seconds(job))
            self.queue.add(_QueuedRequest(tenant=ANONYMOUS, due=due, request=job))

    def send_queued(self, now: float) -> Placed:
        self._read_reports(now)
        while len(self.queue) and self._has_room:
            yield self._place(self.queue.pop()[0].request, now)

    def record_first_token(self, job: SimulatedRequest) -> None:
        if (number := self._sent.get(id(job))) is not None:
            self._loads[job.group].record_first_output(number)
            self.expected.remove(self._groups[job.group].bit, id(job))

    def record_end(self, job: SimulatedRequest) -> None:
        if (number := self._sent.pop(id(job), None)) is not None:
            self._loads[job.group].end_choices(number)
            self._answer_tokens += (job.output - self._answer_tokens) / ANSWERS_AVERAGED

    @property
    def _has_room(self) -> bool:
        return any(load.has_room for name, load in self._loads.items() if name in self._serving)

    def _read_reports(self, now: float) -> None:
        """Take the groups' reports up to now."""
        tick = math.floor(now / self._period) * self._period
        for name, group in self._groups.items():
            group.make_report(tick)
            if group.reports == self._reports_read[name]:
                continue
            self._reports_read[name] = group.reports
            sent_at = self._sent_at[name]
            while sent_at and sent_at[0] <= tick:
                sent_at.popleft()
                self._reported[name] += 1
            group.report.submissions = self._reported[name]  # each router has its own stream, and its own count
            self._loads[name].apply_report(group.report, tick)

    def _matched(self, job: SimulatedRequest) -> Mapping[str, PrefixMatch]:
        """The blocks of the prompt that each group holds, or has been sent to compute."""
        matches = match_prefix(job.chain, self._all, self._holders, self.expected.groups)
        return {self._names[bit]: match for bit, match in matches.items()}

    def _prompt_seconds(self, job: SimulatedRequest) -> float:
        """The least time that the prompt takes to compute on one of the groups."""
        matched = self._matched(job)
        if self._rule is None:
            costs = self._decide(job, matched, self._serving).table
            return float((costs.prefill_seconds + costs.restore_seconds).min())
        return min([self._groups[name].prompt_seconds(job, matched.get(name, NO_MATCH)) for name in self._serving])

    def _decide(self, job: SimulatedRequest, matched: Mapping[str, PrefixMatch], names: Container[str]) -> Decision:
        chosen = [name for name in self._loads if name in names]
        slots = np.array([self._loads[name].slot for name in chosen])
        tokens = np.array([matched.get(name, NO_MATCH) for name in chosen], float).T * BLOCK
        return choose_group(
            self._table.candidates(np.array(chosen, object), slots, *tokens),
            job.prompt,
            self._rng,
            queued_in_router=len(self.queue),
            answer_tokens=self._answer_tokens,
        )

    def _place(self, job: SimulatedRequest, now: float) -> tuple[SimulatedRequest, SimulatedGroup]:
        matched = self._matched(job)
        names = [name for name in self._loads if name in self._serving and not self._loads[name].is_full]
        if self._rule is None:
            job.group = self._place_by_cost(job, matched, names, now)
        else:
            job.group = self._place_by_rule(self._rule, job, matched, names, now)
        self._sent_at[job.group].append(now)
        cached = matched.get(job.group, NO_MATCH).blocks * BLOCK
        self._sent[id(job)] = self._loads[job.group].add_submission(job.prompt - cached)
        group = self._groups[job.group]
        self.expected.add(group.bit, id(job), job.chain)
        return job, group

    def _place_by_cost(
        self, job: SimulatedRequest, matched: Mapping[str, PrefixMatch], names: Sequence[str], now: float
    ) -> str:
        """The group that choose_group() chooses, and keeps the request. A group that other routers have sent more work
        meanwhile returns it, with the length of its queue."""
        for _ in range(_MAX_RETURNS):
            chosen = self._replication.consider_copy(self._decide(job, matched, names), job.chain, BLOCK).chosen
            load, queued = self._loads[chosen.group], self._groups[chosen.group].queued_now(now)
            limit = load.max_queued_tokens(chosen.queued_tokens)
            if limit is None or queued <= limit:
                return chosen.group
            number = load.add_submission(job.prompt - chosen.cached_tokens)
            load.record_return(number, int(queued))
            load.end_choices(number)
            self._sent_at[chosen.group].append(now)
            self._groups[chosen.group].count_submission(now)
        return self._replication.consider_copy(self._decide(job, matched, names), job.chain, BLOCK).group

    def _place_by_rule(
        self, rule: Rule, job: SimulatedRequest, matched: Mapping[str, PrefixMatch], names: Sequence[str], now: float
    ) -> str:
        """The group that a published rule chooses, with our knowledge of prompts in flight and our gate: a group
        without room only if it holds more of the prompt than every group with room."""
        blocks = {name: match.blocks for name, match in matched.items()}
        most = max((blocks.get(name, 0) for name in names if self._loads[name].has_room), default=-1)
        allowed = [name for name in names if self._loads[name].has_room or blocks.get(name, 0) > most]
        groups = [self._groups[name] for name in allowed]
        return rule(job, groups, CachedPrefix(job.chain, groups, blocks), now, self._rng).name
