"""SimulatedRouter: routes to simulated groups by our own choose_group() or by a published rule.

Ours keeps requests in its own queue while no group has room, and sees what a router sees when it serves: load reports,
events, and the requests that it has sent itself. A published rule places each request when it comes, or, with
`queued`, gets our queue, our gate for groups without room, and the blocks that groups are computing. In both cases it
sees the true state of every group.

Several routers take requests in turn. Each gets the reports and events of every group, knows only the requests that it
has sent itself, and has a queue of its own.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coatcheck.bench.routing_simulation.rules import Rule
from coatcheck.bench.routing_simulation.service_model import BLOCK, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_tiers import block_name
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration, SnapshotChunk
from coatcheck.router.access.tenant import ANONYMOUS
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.routing.prefix_match import NO_MATCH, PrefixMatch
from coatcheck.router.routing.prefix_replication import PrefixReplication
from coatcheck.router.routing.routing_cost import GUESSED_ANSWER_TOKENS, Decision, choose_group
from coatcheck.router.serving.admission_queue import ANSWERS_AVERAGED, due_at
from coatcheck.router.serving.fair_queue import FairQueue, QueueEntry

# Requests that are sent now, and the group of each.
Placed = Iterator[tuple[SimulatedRequest, SimulatedGroup]]


class SimulatedRouter:
    """`add_request` in order of arrival; `send_queued` when a group may have room; `update` after each step.

    `rule`: None is our own choose_group(). `serving`: names of the groups that take requests; the caller may change it.
    """

    def __init__(
        self,
        groups: Sequence[SimulatedGroup],
        rule: Rule | None,
        rng: random.Random,
        routers: int = 1,
        *,
        queued: bool = True,
    ) -> None:
        self.serving = {group.name for group in groups}
        self._groups = {group.name: group for group in groups}
        self._rule = rule
        self._queued = queued  # of a published rule
        self._rng = rng
        self._views = [_View(groups, self.serving, rule, rng) for _ in range(routers)]
        self._turn = 0

    def add_request(self, job: SimulatedRequest) -> Placed:
        """Send a request, or queue it if no group has room."""
        view = self._views[self._turn % len(self._views)]
        self._turn += 1
        if self._queued or self._rule is None:
            yield from view.add_request(job)
            return
        matched = {name: m.device + m.host for name, m in view.index.matched_blocks(_chain(job)).items()}
        serving = [group for name, group in self._groups.items() if name in self.serving]
        group = self._rule(job, serving, matched, job.at, self._rng)
        job.group = group.name
        yield job, group

    def send_queued(self, now: float) -> Placed:
        """Send queued requests while groups have room."""
        for view in self._views:
            yield from view.send_queued(now)

    @property
    def waiting(self) -> int:
        """Queued requests of all routers."""
        return sum(len(view.queue) for view in self._views)

    def update(self, group: SimulatedGroup) -> None:
        """Take the group's KV events, first tokens and ended requests."""
        events = group.drain_events()
        for view in self._views:
            if events is not None:
                view.index.apply_events(group.name, events)
            for job in group.started:
                view.record_first_token(job)
            for job in group.finished:
                view.record_end(job)
        group.started.clear()
        group.finished.clear()

    @property
    def indexed_entries(self) -> int:
        """Blocks by group and tier that the first router knows of."""
        return self._views[0].index.entries

    def check(self) -> None:
        """Raises AssertionError if a router expects a prefill after all requests have ended."""
        for view in self._views:
            view.index.check()
            view.queue.check()
            assert not len(view.index.expected_blocks), "an answered prompt is still expected"


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
        self.index = PrefixIndex()
        self._replication = PrefixReplication()
        self._answer_tokens = GUESSED_ANSWER_TOKENS
        self.queue: FairQueue[_QueuedRequest] = FairQueue(1 << 30)  # nothing is refused
        self._groups = {group.name: group for group in groups}
        self._rng = rng
        self._loads: dict[str, GroupLoad] = {}
        self._sent: dict[int, int] = {}  # id of a request -> its number in its group's load
        # Times of the submissions that no report contains yet, and the number of those that the last report contains.
        self._sent_at: dict[str, deque[float]] = {group.name: deque() for group in groups}
        self._reported = dict.fromkeys(self._groups, 0)
        for group in groups:
            most = group.model
            registration = Registration(
                model=GetModelResponse(block_size=BLOCK),
                num_blocks=most.blocks,
                max_batch_tokens=most.chunk,
                max_num_seqs=most.max_sequences,
            )
            self.index.add_group(group.name, group.name, most.blocks + most.host_blocks)
            self.index.apply_snapshot(group.name, SnapshotChunk(epoch=group.name, first=True, last=True))
            self._loads[group.name] = GroupLoad(registration)

    def add_request(self, job: SimulatedRequest) -> Placed:
        self._read_reports(job.at)
        if not len(self.queue) and self._has_room:
            yield self._place(job, job.at)
        else:
            costs = self._decide(job, self._matched(job), self._serving).costs
            seconds = min(cost.prefill_seconds + cost.restore_seconds for cost in costs)
            self.queue.add(_QueuedRequest(tenant=ANONYMOUS, due=due_at(job.at, seconds), request=job))

    def send_queued(self, now: float) -> Placed:
        self._read_reports(now)
        while len(self.queue) and self._has_room:
            yield self._place(self.queue.pop()[0].request, now)

    def record_first_token(self, job: SimulatedRequest) -> None:
        if (number := self._sent.get(id(job))) is not None:
            self._loads[job.group].record_first_output(number)
            self.index.remove_expected(job.group, id(job))

    def record_end(self, job: SimulatedRequest) -> None:
        if (number := self._sent.pop(id(job), None)) is not None:
            self._loads[job.group].end_choices(number)
            self._answer_tokens += (job.output - self._answer_tokens) / ANSWERS_AVERAGED

    @property
    def _has_room(self) -> bool:
        return any(load.has_room for name, load in self._loads.items() if name in self._serving)

    def _read_reports(self, now: float) -> None:
        """Take the groups' reports up to now."""
        for name, load in self._loads.items():
            group = self._groups[name]
            if (report := group.load(now)) is not load.last:
                period = group.model.report_seconds
                tick = math.floor(now / period) * period
                sent_at = self._sent_at[name]
                while sent_at and sent_at[0] <= tick:
                    sent_at.popleft()
                    self._reported[name] += 1
                report.submissions = self._reported[name]  # each router has its own stream, and its own count
                load.report(report, tick)

    def _matched(self, job: SimulatedRequest) -> Mapping[str, PrefixMatch]:
        return self.index.matched_blocks(_chain(job))

    def _decide(self, job: SimulatedRequest, matched: Mapping[str, PrefixMatch], names: Iterable[str]) -> Decision:
        candidates = [
            load.candidate(name, matched.get(name, NO_MATCH)) for name, load in self._loads.items() if name in names
        ]
        return choose_group(
            candidates, job.prompt, self._rng, queued_in_router=len(self.queue), answer_tokens=self._answer_tokens
        )

    def _place(self, job: SimulatedRequest, now: float) -> tuple[SimulatedRequest, SimulatedGroup]:
        matched = self._matched(job)
        names = [name for name in self._loads if name in self._serving and not self._loads[name].is_full]
        if self._rule is None:
            decision = self._decide(job, matched, names)
            job.group = self._replication.review(decision, _chain(job), BLOCK).group
        else:
            job.group = self._place_by_rule(self._rule, job, matched, names, now)
        self._sent_at[job.group].append(now)
        cached = matched.get(job.group, NO_MATCH).blocks * BLOCK
        self._sent[id(job)] = self._loads[job.group].add_submission(job.prompt - cached)
        self.index.add_expected(job.group, id(job), _chain(job))
        return job, self._groups[job.group]

    def _place_by_rule(
        self, rule: Rule, job: SimulatedRequest, matched: Mapping[str, PrefixMatch], names: Sequence[str], now: float
    ) -> str:
        """The group that a published rule chooses, with our knowledge of prompts in flight and our gate: a group
        without room only if it holds more of the prompt than every group with room."""
        blocks = {name: match.blocks for name, match in matched.items()}
        most = max((blocks.get(name, 0) for name in names if self._loads[name].has_room), default=-1)
        allowed = [name for name in names if self._loads[name].has_room or blocks.get(name, 0) > most]
        return rule(job, [self._groups[name] for name in allowed], blocks, now, self._rng).name


def _chain(job: SimulatedRequest) -> list[bytes]:
    return [block_name(block) for block in job.chain]
