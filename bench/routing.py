"""Compares our choose_group(), index and queue with the published routing rules of others, in a simulation.

The load is three public traces and eleven made-up workloads (workloads.py), on groups that are alike, or differ in
speed or size, or drain and join. Each rule runs in each cell twice: as published, placing each request when it comes,
and behind our queue, with our knowledge of prompts in flight. In both cases the rules of others see every group's true
state at each moment. Our router sees what it would in production: reports every 100 ms, events, what it has sent.

    python bench/routing.py [--traces DIR] [--json out.json] [--only conversation/3000/0.95] [--routers 4]

Cells that the JSON file has are not run again, so an interrupted run continues. After a change to routing,
`--ours` runs our router alone in the cells that the file has and keeps the figures of the other rules, which do not
depend on it unless our queue has changed. Keep a copy of the file: an interrupted `--ours` leaves only the cells that
it finished. After a change to the simulation delete the file.
public_traces.py says where the traces come from; they are looked for in bench/traces unless --traces is given.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.bench.routing_simulation.rules import rules
from coatcheck.bench.routing_simulation.service_model import ServiceModel
from coatcheck.bench.routing_simulation.simulation import (
    GROUPS,
    OURS,
    Cell,
    Cluster,
    SimulationResult,
    pooled_hits,
    run,
)
from coatcheck.bench.routing_simulation.workloads import WORKLOADS
from coatcheck.bench.setup.public_traces import AZURE, CONVERSATION, FOLDER, SYNTHETIC, Traces, check_traces
from coatcheck.bench.setup.results_file import write_results
from coatcheck.cluster.benchmark.request_trace import read_trace
from coatcheck.cluster.command import fail
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig

FILES = {"conversation": CONVERSATION, "synthetic": SYNTHETIC, "azure": AZURE}
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
SIZES = (1000, 3000, 10_000)
QUEUED = " + our queue"  # after the name of a rule that runs behind our queue
_SEED = 1  # of the made-up workloads
_NAMES = (*FILES, *WORKLOADS)


def _sizes(workload: str) -> tuple[int, ...]:
    # The Azure trace names no prefixes, so the size of the cache hardly matters to it.
    return (3000,) if workload == "azure" else SIZES


CELLS = (
    *(Cell(name, blocks, load) for name in _NAMES for blocks in _sizes(name) for load in LOADS),
    *(Cell(name, 1000, load, 4000) for name in ("conversation", "synthetic", "tenants") for load in (0.5, 0.85)),
    *(
        Cell(name, 3000, load, cluster=cluster)
        for name in ("conversation", "shared prompt 4k", "tenants", "retrieval", "chats")
        for cluster in (Cluster.MIXED_SPEEDS, Cluster.MIXED_SIZES, Cluster.CHANGING)
        for load in LOADS
    ),
)


def _cells(only: str) -> list[Cell]:
    """The cells whose name begins with `only`. Raises InvalidConfig if there is none."""
    cells = [cell for cell in CELLS if cell.name.startswith(only)]
    if not cells:
        names = f"{CELLS[0].name} to {CELLS[-1].name}"
        raise InvalidConfig(f"no cell's name begins with {only!r}; they are workload/blocks/load, {names}")
    return cells


def _run_cell(
    task: tuple[Cell, Path, int, dict[str, SimulationResult]],
) -> tuple[Cell, float, dict[str, SimulationResult]]:
    """Run the rules whose outcome in a cell is not known yet. Return (cell, pooled hit ratio, outcomes by rule)."""
    cell, traces, routers, known = task
    entries = read_trace(traces / FILES[cell.workload]) if cell.workload in FILES else WORKLOADS[cell.workload](_SEED)
    hits = pooled_hits(entries, sum(model.blocks + model.host_blocks for model in cell.models(GROUPS)))
    outcomes = dict(known)
    outcomes[OURS], pooled = run(cell, None, entries, routers=routers, hits=hits)
    for name in rules():
        for queued in (False, True):
            key = name + QUEUED if queued else name
            if key not in known:
                outcomes[key], _ = run(cell, rules()[name], entries, hits=hits, queued=queued)
    return cell, pooled, outcomes


def _best(outcomes: Mapping[str, SimulationResult], figure: str) -> tuple[str, float]:
    """(rule, value) of the least `figure`, of goodput the greatest."""
    sign = -1 if figure == "goodput" else 1
    name = min(outcomes, key=lambda rule: sign * getattr(outcomes[rule], figure))
    return name, getattr(outcomes[name], figure)


def _row(cell: Cell, pooled: float, outcomes: dict[str, SimulationResult]) -> tuple[str, list[bool]]:
    """(line of the table, which of TARGETS are reached)."""
    ours = outcomes[OURS]
    published = {rule: outcome for rule, outcome in outcomes.items() if rule != OURS and not rule.endswith(QUEUED)}
    queued = {rule.removesuffix(QUEUED): outcome for rule, outcome in outcomes.items() if rule.endswith(QUEUED)}
    parts, reached = [], []
    for others in (published, queued):
        for figure in ("ttft_p90", "ttft_p99"):
            name, value = _best(others, figure)
            ratio = getattr(ours, figure) / value
            parts.append(f"{value:.2f} {name} | {ratio:.2f}")
            reached.append(ratio <= 1.05)
    name, value = _best({**published, **queued}, "goodput")
    reached += [ours.goodput >= 0.98 * value, ours.imbalance <= 1.15]
    line = (
        f"| {cell.name} | {ours.ttft_p90:.2f} | {ours.ttft_p99:.2f} | {' | '.join(parts)} "
        f"| {ours.goodput:.3f} / {value:.3f} {name} | {ours.hit_ratio:.3f} / {pooled:.3f} | {ours.imbalance:.2f} |"
    )
    return line, reached


COLUMNS = (
    "cell", "ours: TTFT p90", "p99", "best p90 as published", "ratio", "best p99", "ratio", "best p90 + our queue",
    "ratio", "best p99", "ratio", "goodput: ours / best", "hits: ours / pooled", "max/mean work",
)  # fmt: skip
TARGETS = (
    "p90 at most 1.05 of the best as published", "p99", "p90 at most 1.05 of the best with our queue", "p99",
    "goodput at least 0.98 of the best", "work at most 1.15 of the mean",
)  # fmt: skip


def _read(path: Path | None, routers: int) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run, by cell. Raises InvalidConfig if its service times or routers were others."""
    if path is None or not path.exists():
        return {}
    written = json.loads(path.read_text())
    if written["model"] != asdict(ServiceModel()):
        raise InvalidConfig(f"{path} has other service times; take it away to begin anew")
    if (theirs := written.get("routers", 1)) != routers:
        raise InvalidConfig(
            f"{path} is of {counted(theirs, 'router')}; name another file, or take it away to begin anew"
        )
    return {row["cell"]: row for row in written["cells"]}


def _parse(cell: Cell, row: dict[str, Any]) -> tuple[Cell, float, dict[str, SimulationResult]]:
    return cell, row["pooled_hit_ratio"], {rule: SimulationResult(**figures) for rule, figures in row["rules"].items()}


def main(
    traces: Traces = FOLDER,
    only: Annotated[str, typer.Option(help="Run only cells whose name begins with this.")] = "",
    routers: Annotated[int, typer.Option(help="Routers that share our requests, each with its own view.")] = 1,
    ours: Annotated[bool, typer.Option("--ours", help="Run our router again in the cells that the file has.")] = False,
    processes: Annotated[int, typer.Option(help="Processes at once.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print a line per cell, ours beside the best other by each figure, and how many cells reach each target."""
    try:
        cells = _cells(only)
        check_traces(traces, dict.fromkeys(FILES[cell.workload] for cell in cells if cell.workload in FILES))
        known = _read(json_path, routers)
    except InvalidConfig as error:
        sys.exit(fail(str(error), 2))
    began = time.perf_counter()
    parsed = {cell.name: _parse(cell, known[cell.name]) for cell in cells if cell.name in known}
    others = {name: {r: o for r, o in outcomes.items() if r != OURS} for name, (_, _, outcomes) in parsed.items()}
    if ours:
        parsed = {}
    results, tally = dict(known), [0] * len(TARGETS)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        tasks = [(cell, traces, routers, others.get(cell.name, {})) for cell in cells if cell.name not in parsed]
        for cell, pooled, outcomes in chain(parsed.values(), pool.imap(_run_cell, tasks)):
            line, reached = _row(cell, pooled, outcomes)
            print(line, flush=True)
            tally = [count + ok for count, ok in zip(tally, reached, strict=True)]
            if cell.name in parsed:
                continue
            rows = {rule: asdict(outcome) for rule, outcome in outcomes.items()}
            results[cell.name] = {"cell": cell.name, "pooled_hit_ratio": pooled, "rules": rows}
            written = {"model": asdict(ServiceModel()), "routers": routers, "cells": list(results.values())}
            write_results(json_path, written)
    print(f"of {len(cells)}: " + ", ".join(f"{name} in {count}" for name, count in zip(TARGETS, tally, strict=True)))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
