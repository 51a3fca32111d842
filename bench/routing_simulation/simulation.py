"""A discrete-event simulation of one routing rule in one cell: a trace at one cache size and one load.

Arrivals of a trace are sped up until the work that one pooled cache of all groups would leave is a given share of what
the groups can do: a load of 0.95 can only just be served by perfect routing. Deterministic by seed. Nothing is refused
and nothing times out.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coatcheck.bench.routing_simulation.cells import CHANGES, GROUPS, Cell, Change, Cluster
from coatcheck.bench.routing_simulation.rules import Rule
from coatcheck.bench.routing_simulation.service_model import ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_index import BlockHolders
from coatcheck.bench.routing_simulation.simulated_router import Placed, SimulatedRouter
from coatcheck.bench.routing_simulation.workload import Workload


class SimulationResult(NamedTuple):
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


def run(
    cell: Cell,
    make_rule: Callable[[], Rule] | None,
    workload: Workload,
    *,
    groups: int = GROUPS,
    queued: bool = False,
    seed: int = 0,
) -> SimulationResult:
    """One rule in one cell. `make_rule`: see SimulatedRouter; None is our own. `queued`: the rule gets our queue."""
    models = cell.models(groups)
    jobs = workload.jobs(models, cell.load)
    holders = BlockHolders()
    members = [SimulatedGroup(place, model, holders) for place, model in enumerate(models)]
    router = SimulatedRouter(members, make_rule, random.Random(seed), cell.routers, queued=queued)
    simulate(jobs, members, router, CHANGES if cell.cluster is Cluster.CHANGING else ())
    for member in members:
        member.check()
    return _outcome(jobs, members, models[0])


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
