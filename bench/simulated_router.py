"""SimulatedRouter: a rule in front of simulated groups: another's, or our router's own index, loads and choose().

With several routers each takes requests in turn, hears every group, and knows only its own part of what is on its way.
It does not know time but by the jobs that come.
"""

import math
import random
from collections.abc import Sequence

from coatcheck.bench.routing_rules import Rule
from coatcheck.bench.service_model import BLOCK, Job
from coatcheck.bench.simulated_group import SimulatedGroup, block_name
from coatcheck.proto.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.worker_pb2 import Registration, SnapshotChunk
from coatcheck.router.expectations import Expectation
from coatcheck.router.group_load import GroupLoad
from coatcheck.router.policy import choose
from coatcheck.router.prefix_index import NOTHING, PrefixIndex


class SimulatedRouter:
    """`place` in order of arrival; `hear` after whatever a group does."""

    def __init__(
        self, groups: Sequence[SimulatedGroup], rule: Rule | None, rng: random.Random, routers: int = 1
    ) -> None:
        self._groups = {group.name: group for group in groups}
        self._rule = rule
        self._rng = rng
        self._views = [_View(groups) for _ in range(routers)]
        self._turn = 0

    def place(self, job: Job) -> SimulatedGroup:
        """Where it goes."""
        view = self._views[self._turn % len(self._views)]
        self._turn += 1
        chain = [block_name(block) for block in job.chain]
        if self._rule is None:
            job.group = view.place(job, chain, self._groups, self._rng)
        else:
            matched = {name: (m.device, m.host) for name, m in view.index.matched_blocks(chain).items()}
            job.group = self._rule(job, list(self._groups.values()), matched, job.at, self._rng).name
        return self._groups[job.group]

    def hear(self, group: SimulatedGroup) -> None:
        """Takes its events, then what it has begun to answer."""
        events = group.drain_events()
        for view in self._views:
            if events is not None:
                view.index.apply(group.name, events)
            for job in group.started:
                view.answered(job)
        group.started.clear()

    @property
    def indexed_entries(self) -> int:
        """Blocks by group and tier that the first router knows of."""
        return self._views[0].index.stats().entries

    def check(self) -> None:
        """Raises AssertionError on a broken invariant: once all is answered nothing is expected any more."""
        for view in self._views:
            view.index.check()
            assert not view.index.stats().expected, "an answered prompt is still expected"


class _View:
    """What one router knows."""

    def __init__(self, groups: Sequence[SimulatedGroup]) -> None:
        self.index = PrefixIndex()
        self._loads: dict[str, GroupLoad] = {}
        self._expectations: dict[int, Expectation] = {}
        for group in groups:
            model = GetModelResponse(block_size=BLOCK)
            registration = Registration(model=model, num_blocks=group.model.blocks, max_batch_tokens=group.model.chunk)
            self.index.add_group(group.name, group.name, group.model.blocks + group.model.host_blocks)
            self.index.apply_snapshot(group.name, SnapshotChunk(epoch=group.name, first=True, last=True))
            self._loads[group.name] = GroupLoad(registration)

    def place(self, job: Job, chain: list[bytes], groups: dict[str, SimulatedGroup], rng: random.Random) -> str:
        matched = self.index.matched_blocks(chain)
        candidates = []
        for name, load in self._loads.items():
            group = groups[name]
            if (report := group.load(job.at)) is not load.last:
                period = group.model.report_seconds
                load.report(report, math.floor(job.at / period) * period)
            candidates.append(load.candidate(name, matched.get(name, NOTHING)))
        decision = choose(candidates, job.prompt, rng, regret=self.index.regret.rate)
        self._loads[decision.group].sent(job.prompt - decision.chosen.cached_tokens, job.at)
        if (expectation := self.index.expect(decision.group, chain)) is not None:
            self._expectations[id(job)] = expectation
        return decision.group

    def answered(self, job: Job) -> None:
        if (expectation := self._expectations.pop(id(job), None)) is not None:
            self.index.settle(expectation)
