"""A discrete-event simulation of one routing rule in one cell: a trace at one cache size and one load.

Arrivals of a trace are sped up until the work that one pooled cache of all groups would leave is a given share of what
the groups can do: a load of 0.95 can only just be served by perfect routing. Deterministic by seed. Nothing is refused
and nothing times out.
"""

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from coatcheck.bench.routing_simulation.rules import Rule
from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_router import Placed, SimulatedRouter
from coatcheck.cluster.benchmark.request_trace import TraceEntry

GROUPS = 8
OURS = "coatcheck"


class Cluster(Enum):
    """How the groups of a cell differ from each other."""

    EQUAL = ""
    MIXED_SPEEDS = "mixed speeds"  # a quarter of the groups is half as fast
    MIXED_SIZES = "mixed sizes"  # half of the groups have twice the blocks, the others a third
    CHANGING = "changing"  # groups drain and join while requests come; the load counts all groups


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one cache size (`blocks` of each group) and one load."""

    workload: str
    blocks: int
    load: float
    host_blocks: int = 0
    cluster: Cluster = Cluster.EQUAL

    @property
    def name(self) -> str:
        host = f"+{self.host_blocks} host" if self.host_blocks else ""
        cluster = f"/{self.cluster.value}" if self.cluster.value else ""
        return f"{self.workload}/{self.blocks}{host}/{self.load:g}{cluster}"

    def models(self, groups: int) -> list[ServiceModel]:
        """The service model of each group."""
        model = ServiceModel(blocks=self.blocks, host_blocks=self.host_blocks)
        if self.cluster is Cluster.MIXED_SPEEDS:
            slow = groups // 4
            return [model] * (groups - slow) + [model.slowed(2)] * slow
        if self.cluster is Cluster.MIXED_SIZES:
            large, small = replace(model, blocks=2 * self.blocks), replace(model, blocks=self.blocks // 3)
            return [large if place < groups // 2 else small for place in range(groups)]
        return [model] * groups


class Change(NamedTuple):
    """At a time, as a share of the run, a group begins or ceases to take requests."""

    when: float
    group: int
    serves: bool


# Of a cluster that changes, the last group joins late.
CHANGES = (
    Change(0.0, -1, False),
    Change(0.2, 0, False),
    Change(0.35, -1, True),
    Change(0.5, 1, False),
    Change(0.6, 0, True),
    Change(0.7, 2, False),
    Change(0.8, 1, True),
)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of one rule in one cell. TTFT in seconds; `goodput` and `success` are shares of all requests.

    Good is a first token within 2 s and twice what its whole prompt takes alone, then at most 100 ms a token; a success
    is a first token within 60 s. `imbalance` is the largest group's work over the mean.
    """

    hit_ratio: float
    imbalance: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    goodput: float
    success: float


def simulate(
    jobs: Sequence[SimulatedRequest],
    groups: Sequence[SimulatedGroup],
    router: SimulatedRouter,
    changes: Sequence[Change] = (),
) -> None:
    """Run every job to its end."""
    by_name = {group.name: group for group in groups}
    period = groups[0].model.report_seconds
    due: list[tuple[float, str]] = []
    report = math.inf  # when the router next looks for room for its queue: at the groups' next reports

    def update(group: SimulatedGroup) -> None:
        router.update(group)
        if group.until < math.inf:
            heapq.heappush(due, (group.until, group.name))

    def submit(placed: Placed, now: float) -> None:
        nonlocal report
        for job, group in placed:
            group.submit(job, now)
            update(group)
        report = (math.floor(now / period + 1e-6) + 1) * period if router.waiting else math.inf

    def run_until(limit: float) -> None:
        while (when := min(due[0][0] if due else math.inf, report)) <= limit and when < math.inf:
            if due and due[0][0] == when:
                _, name = heapq.heappop(due)
                group = by_name[name]
                if group.until != when:  # an outdated entry: another one has the new time
                    continue
                group.advance()
                update(group)
            if router.waiting:
                submit(router.send_queued(when), when)

    coming = deque(changes)
    for job in jobs:
        while coming and coming[0].when * jobs[-1].at <= job.at:
            change = coming.popleft()
            run_until(change.when * jobs[-1].at)
            (router.serving.add if change.serves else router.serving.discard)(groups[change.group].name)
        run_until(job.at)
        submit(router.add_request(job), job.at)
    run_until(math.inf)


def pooled_hits(entries: Sequence[TraceEntry], blocks: int) -> list[int]:
    """Prompt tokens of each request that are found in one LRU cache of `blocks` blocks."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for entry in entries:
        blocks_of = _chain(entry)
        hits.append(next((place for place, block in enumerate(blocks_of) if block not in held), len(blocks_of)) * BLOCK)
        for block in reversed(blocks_of):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits


def speed_up(entries: Sequence[TraceEntry], hits: Sequence[int], models: Sequence[ServiceModel], load: float) -> float:
    """The factor on the rate of arrivals for `load`. A group's capacity is in proportion to its prefill rate."""
    model = models[0]
    work = sum(
        model.work(entry.input_len - hit, 0, entry.input_len + entry.output_len // 2, entry.output_len)
        for entry, hit in zip(entries, hits, strict=True)
    )
    capacity = sum(group.prefill_rate for group in models) / model.prefill_rate
    return load * capacity * entries[-1].at / work


def run(
    cell: Cell,
    rule: Rule | None,
    entries: Sequence[TraceEntry],
    *,
    groups: int = GROUPS,
    routers: int = 1,
    queued: bool = False,
    seed: int = 0,
    hits: Sequence[int] | None = None,
) -> tuple[SimulationResult, float]:
    """One rule in one cell, and the pooled cache's hit ratio. `rule`: None is our own. `queued`: the rule gets our
    queue. `hits` are those of `pooled_hits`, if they are known."""
    models = cell.models(groups)
    hits = hits or pooled_hits(entries, sum(model.blocks + model.host_blocks for model in models))
    speed = speed_up(entries, hits, models, cell.load)
    jobs = [
        SimulatedRequest(entry.at / speed, entry.input_len, max(entry.output_len, 1), _chain(entry))
        for entry in entries
    ]
    members = [SimulatedGroup(f"g{place}", model) for place, model in enumerate(models)]
    router = SimulatedRouter(members, rule, random.Random(seed), routers, queued=queued)
    simulate(jobs, members, router, CHANGES if cell.cluster is Cluster.CHANGING else ())
    for member in members:
        member.check()
    return _outcome(jobs, members, models[0]), sum(hits) / sum(job.prompt for job in jobs)


def _chain(entry: TraceEntry) -> tuple[int, ...]:
    # A prompt's last token is always computed, so a block that ends with it is never looked up.
    return entry.blocks[: (entry.input_len - 1) // BLOCK]


def _outcome(
    jobs: Sequence[SimulatedRequest], groups: Sequence[SimulatedGroup], model: ServiceModel
) -> SimulationResult:
    waits = sorted(job.first_token - job.at for job in jobs)
    p50, p90, p99 = (waits[round(share * (len(waits) - 1))] for share in (0.5, 0.9, 0.99))
    good = sum(
        job.first_token - job.at <= 2 + 2 * job.prompt / model.prefill_rate
        and job.ended - job.first_token <= 0.1 * (job.output - 1)
        for job in jobs
    )
    work = [group.work for group in groups]
    return SimulationResult(
        hit_ratio=sum(job.cached for job in jobs) / sum(job.prompt for job in jobs),
        imbalance=max(work) * len(work) / sum(work),
        ttft_p50=p50,
        ttft_p90=p90,
        ttft_p99=p99,
        goodput=good / len(jobs),
        success=sum(wait <= 60 for wait in waits) / len(waits),
    )
