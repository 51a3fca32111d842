"""What routing is worth: the router's own choose() and index beside the published rules of others, over real traces.

A discrete-event simulator: groups as in simulated_group.py, arrivals of a trace sped up until the work that one pooled
cache of all groups would leave is a given share of what the groups can do. So a load of 0.95 can only just be served
by perfect routing. Deterministic by seed. The rules of others see every group's true state at each moment; our router
sees what it would: reports each 100 ms, events, and what it has sent itself. Nothing is refused and nothing times out.

    python bench/routing.py [--traces ../shared/traces] [--json out.json] [--only conversation/3000/0.95] [--routers 4]

Cells that the JSON file has are not run again: what was cut off goes on. Take the file away after a change to routing.
"""

import heapq
import json
import math
import multiprocessing
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.bench.routing_rules import Rule, rules
from coatcheck.bench.service_model import BLOCK, Job, ServiceModel
from coatcheck.bench.simulated_group import SimulatedGroup
from coatcheck.bench.simulated_router import Placed, SimulatedRouter
from coatcheck.cluster.trace import TraceEntry, read_trace

FILES = {
    "conversation": "mooncake_conversation.jsonl.gz",
    "synthetic": "mooncake_synthetic.jsonl.gz",
    "azure": "azure_conv_2023.csv.gz",
}
GROUPS = 8
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
SIZES = (1000, 3000, 10_000)
OURS = "coatcheck"


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one size of cache and one load."""

    trace: str
    blocks: int
    load: float
    host_blocks: int = 0

    @property
    def name(self) -> str:
        host = f"+{self.host_blocks} host" if self.host_blocks else ""
        return f"{self.trace}/{self.blocks}{host}/{self.load:g}"


# The Azure trace names no prefixes, so that the size of the cache hardly matters to it.
CELLS = (
    *(Cell(trace, blocks, load) for trace in ("conversation", "synthetic") for blocks in SIZES for load in LOADS),
    *(Cell("azure", 3000, load) for load in LOADS),
    *(Cell(trace, 1000, load, 4000) for trace in ("conversation", "synthetic") for load in (0.5, 0.85)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rule in one cell. TTFT in seconds; `goodput` and `success` are shares of all requests.

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


def simulate(jobs: Sequence[Job], groups: Sequence[SimulatedGroup], router: SimulatedRouter) -> None:
    """Runs every job to its end."""
    by_name = {group.name: group for group in groups}
    period = groups[0].model.report_seconds
    due: list[tuple[float, str]] = []
    report = math.inf  # when the router next looks whether some group has room: with the groups' next reports

    def moved(group: SimulatedGroup) -> None:
        router.hear(group)
        if group.until < math.inf:
            heapq.heappush(due, (group.until, group.name))

    def submit(placed: Placed, now: float) -> None:
        nonlocal report
        for job, group in placed:
            group.submit(job, now)
            moved(group)
        report = (math.floor(now / period + 1e-6) + 1) * period if router.waiting else math.inf

    def run_until(limit: float) -> None:
        while (when := min(due[0][0] if due else math.inf, report)) <= limit and when < math.inf:
            if due and due[0][0] == when:
                _, name = heapq.heappop(due)
                group = by_name[name]
                if group.until != when:  # it was cut short, and is due again elsewhere
                    continue
                group.advance()
                moved(group)
            if router.waiting:
                submit(router.move(when), when)

    for job in jobs:
        run_until(job.at)
        submit(router.arrive(job), job.at)
    run_until(math.inf)


def pooled_hits(entries: Sequence[TraceEntry], blocks: int) -> list[int]:
    """Prompt tokens of each request that one cache of so many blocks would have, least recently used going first."""
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


def speed_up(
    entries: Sequence[TraceEntry], hits: Sequence[int], model: ServiceModel, groups: int, load: float
) -> float:
    """What arrivals must be sped up by for that load."""
    work = sum(
        model.work(entry.input_len - hit, 0, entry.input_len + entry.output_len // 2, entry.output_len)
        for entry, hit in zip(entries, hits, strict=True)
    )
    return load * groups * entries[-1].at / work


def run(
    cell: Cell,
    rule: str,
    entries: Sequence[TraceEntry],
    *,
    groups: int = GROUPS,
    routers: int = 1,
    seed: int = 0,
    hits: Sequence[int] | None = None,
) -> tuple[Outcome, float]:
    """One rule in one cell, and the pooled cache's hit ratio; `hits` are those of `pooled_hits`, if they are known."""
    model = ServiceModel(blocks=cell.blocks, host_blocks=cell.host_blocks)
    hits = hits or pooled_hits(entries, (cell.blocks + cell.host_blocks) * groups)
    speed = speed_up(entries, hits, model, groups, cell.load)
    jobs = [Job(entry.at / speed, entry.input_len, max(entry.output_len, 1), _chain(entry)) for entry in entries]
    members = [SimulatedGroup(f"g{place}", model) for place in range(groups)]
    theirs: Rule | None = rules()[rule] if rule != OURS else None
    simulate(jobs, members, SimulatedRouter(members, theirs, random.Random(seed), routers))
    for member in members:
        member.check()
    return _outcome(jobs, members, model), sum(hits) / sum(job.prompt for job in jobs)


def _chain(entry: TraceEntry) -> tuple[int, ...]:
    # A prompt's last token is always computed, so a block that ends with it is never looked up.
    return entry.blocks[: (entry.input_len - 1) // BLOCK]


def _outcome(jobs: Sequence[Job], groups: Sequence[SimulatedGroup], model: ServiceModel) -> Outcome:
    waits = sorted(job.first_token - job.at for job in jobs)
    p50, p90, p99 = (waits[round(share * (len(waits) - 1))] for share in (0.5, 0.9, 0.99))
    good = sum(
        job.first_token - job.at <= 2 + 2 * job.prompt / model.prefill_rate
        and job.ended - job.first_token <= 0.1 * (job.output - 1)
        for job in jobs
    )
    work = [group.work for group in groups]
    return Outcome(
        hit_ratio=sum(job.cached for job in jobs) / sum(job.prompt for job in jobs),
        imbalance=max(work) * len(work) / sum(work),
        ttft_p50=p50,
        ttft_p90=p90,
        ttft_p99=p99,
        goodput=good / len(jobs),
        success=sum(wait <= 60 for wait in waits) / len(waits),
    )


def _run_cell(task: tuple[Cell, Path, int]) -> tuple[Cell, float, dict[str, Outcome]]:
    cell, traces, routers = task
    entries = read_trace(traces / FILES[cell.trace])
    hits = pooled_hits(entries, (cell.blocks + cell.host_blocks) * GROUPS)
    outcomes: dict[str, Outcome] = {}
    pooled = 0.0
    for rule in (*rules(), OURS):
        outcomes[rule], pooled = run(cell, rule, entries, routers=routers if rule == OURS else 1, hits=hits)
    return cell, pooled, outcomes


def _row(cell: Cell, pooled: float, outcomes: dict[str, Outcome]) -> tuple[str, list[bool]]:
    """A line of the table, and whether p90, p99, goodput and imbalance are as they should be, and p90 10% better."""
    ours = outcomes[OURS]
    others = {rule: outcome for rule, outcome in outcomes.items() if rule != OURS}
    by90 = min(others, key=lambda rule: others[rule].ttft_p90)
    by99 = min(others, key=lambda rule: others[rule].ttft_p99)
    by_good = max(others, key=lambda rule: others[rule].goodput)
    r90, r99 = ours.ttft_p90 / others[by90].ttft_p90, ours.ttft_p99 / others[by99].ttft_p99
    gain = ours.goodput - others[by_good].goodput
    reached = [r90 <= 1, r99 <= 1.02, gain >= 0, ours.imbalance <= 1.15, r90 <= 0.9]
    line = (
        f"| {cell.name} | {ours.ttft_p90:.2f} / {others[by90].ttft_p90:.2f} {by90} | {r90:.2f} "
        f"| {ours.ttft_p99:.2f} / {others[by99].ttft_p99:.2f} {by99} | {r99:.2f} "
        f"| {ours.hit_ratio:.3f} / {pooled:.3f} | {ours.imbalance:.2f} "
        f"| {ours.goodput:.3f} / {others[by_good].goodput:.3f} {by_good} | {ours.success:.3f} |"
    )
    return line, reached


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    """What an earlier run has written, by cell. Raises ValueError if its groups were others."""
    if path is None or not path.exists():
        return {}
    written = json.loads(path.read_text())
    if written["model"] != asdict(ServiceModel()):
        raise ValueError(f"{path} has other service times; take it away to begin anew")
    return {row["cell"]: row for row in written["cells"]}


def _parse(cell: Cell, row: dict[str, Any]) -> tuple[Cell, float, dict[str, Outcome]]:
    return cell, row["pooled_hit_ratio"], {rule: Outcome(**figures) for rule, figures in row["rules"].items()}


def main(
    traces: Annotated[Path, typer.Option(help="Where the traces lie.")] = Path("../shared/traces"),
    only: Annotated[str, typer.Option(help="Cells whose name begins so.")] = "",
    routers: Annotated[int, typer.Option(help="Routers that share our requests, each with its own view.")] = 1,
    processes: Annotated[int, typer.Option(help="At once.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Prints a line per cell, ours beside the best other by each figure, and how many cells reach each target."""
    cells = [cell for cell in CELLS if cell.name.startswith(only)]
    began = time.perf_counter()
    known = _read(json_path)
    results, tally = list(known.values()), [0] * 5
    columns = "cell", "TTFT p90: ours / best other", "ratio", "p99", "ratio", "hits: ours / pooled", "max/mean work"
    print("| " + " | ".join((*columns, "goodput", "success")) + " |\n|" + "---|" * 9)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        fresh = pool.imap(_run_cell, [(cell, traces, routers) for cell in cells if cell.name not in known])
        for cell, pooled, outcomes in chain(
            (_parse(cell, known[cell.name]) for cell in cells if cell.name in known), fresh
        ):
            line, reached = _row(cell, pooled, outcomes)
            print(line, flush=True)
            tally = [count + ok for count, ok in zip(tally, reached, strict=True)]
            if cell.name in known:
                continue
            rows = {rule: asdict(outcome) for rule, outcome in outcomes.items()}
            results.append({"cell": cell.name, "pooled_hit_ratio": pooled, "rules": rows})
            if json_path is not None:
                json_path.write_text(json.dumps({"model": asdict(ServiceModel()), "cells": results}, indent=1) + "\n")
    names = ("p90 at or below", "p99 within 2%", "goodput at or above", "work at most 1.15", "p90 10% below")
    print(f"of {len(cells)}: " + ", ".join(f"{name} in {count}" for name, count in zip(names, tally, strict=True)))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
