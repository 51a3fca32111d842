"""Compares the router's own choose_group() and index with the published routing rules of others, in a simulation.

The load is three public traces, and one made-up trace in which all requests share a system prompt. Each rule runs in
each cell, as simulation.py does. The rules of others see every group's true state at each moment, and place each
request when it comes. Our router sees what it would in production (reports every 100 ms, events, what it has sent
itself), and keeps requests in its own queue while no group has room. Part of its lead is therefore due to
the queue.

    python bench/routing.py [--traces DIR] [--json out.json] [--only conversation/3000/0.95] [--routers 4]

Cells that the JSON file has are not run again, so an interrupted run continues. After a change to routing,
`--ours` runs our router alone in the cells that the file has and keeps the figures of the other rules, which do not
depend on it. Keep a copy of the file: an interrupted `--ours` leaves only the cells that it finished. After a change
to the simulation delete the file.
public_traces.py says where the traces come from; they are looked for in bench/traces unless --traces is given.
"""

import json
import multiprocessing
import random
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.bench.routing_simulation.rules import rules
from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel
from coatcheck.bench.routing_simulation.simulation import GROUPS, OURS, Cell, SimulationResult, pooled_hits, run
from coatcheck.bench.setup.public_traces import AZURE, CONVERSATION, FOLDER, SYNTHETIC, Traces, check_traces
from coatcheck.bench.setup.results_file import write_results
from coatcheck.cluster.benchmark.request_trace import TraceEntry, read_trace
from coatcheck.cluster.command import fail
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig

SHARED_PROMPT = "shared prompt"  # a made-up trace: its name in cells
FILES = {"conversation": CONVERSATION, "synthetic": SYNTHETIC, "azure": AZURE}
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
SIZES = (1000, 3000, 10_000)
# The Azure trace names no prefixes, so that the size of the cache hardly matters to it.
CELLS = (
    *(Cell(trace, blocks, load) for trace in ("conversation", "synthetic") for blocks in SIZES for load in LOADS),
    *(Cell("azure", 3000, load) for load in LOADS),
    *(Cell(trace, 1000, load, 4000) for trace in ("conversation", "synthetic") for load in (0.5, 0.85)),
    *(Cell(SHARED_PROMPT, 3000, load) for load in (0.3, 0.5, 0.8)),
)


def _cells(only: str) -> list[Cell]:
    """The cells whose name begins with `only`. Raises InvalidConfig if there is none."""
    cells = [cell for cell in CELLS if cell.name.startswith(only)]
    if not cells:
        names = f"{CELLS[0].name} to {CELLS[-1].name}"
        raise InvalidConfig(f"no cell's name begins with {only!r}; they are trace/blocks/load, {names}")
    return cells


def _run_cell(
    task: tuple[Cell, Path, int, dict[str, SimulationResult]],
) -> tuple[Cell, float, dict[str, SimulationResult]]:
    """Run the rules whose outcome in a cell is not known yet. Return (cell, pooled hit ratio, outcomes by rule)."""
    cell, traces, routers, known = task
    entries = _entries(cell, traces)
    hits = pooled_hits(entries, (cell.blocks + cell.host_blocks) * GROUPS)
    outcomes = dict(known)
    pooled = 0.0
    for rule in (*rules(), OURS):
        if rule in known:
            continue
        outcomes[rule], pooled = run(cell, rule, entries, routers=routers if rule == OURS else 1, hits=hits)
    return cell, pooled, outcomes


def _entries(cell: Cell, traces: Path) -> list[TraceEntry]:
    return shared_prompt_trace() if cell.trace == SHARED_PROMPT else read_trace(traces / FILES[cell.trace])


def shared_prompt_trace(requests: int = 10_000, shared_blocks: int = 8, seed: int = 0) -> list[TraceEntry]:
    """All requests share one system prompt of `shared_blocks` blocks.

    Poisson arrivals, one a second on average. Each request adds 400 to 600 tokens of its own and gets 100 to 300
    tokens, all uniform. The same seed gives the same trace.
    """
    dice = random.Random(seed)
    entries = []
    at = 0.0
    for number in range(requests):
        at += dice.expovariate(1.0)
        length = shared_blocks * BLOCK + dice.randint(400, 600)
        own_blocks = range(shared_blocks, length // BLOCK)
        chain = (*range(shared_blocks), *(shared_blocks * (number + 1) + block for block in own_blocks))
        entries.append(TraceEntry(at, length, dice.randint(100, 300), chain))
    return entries


def _row(cell: Cell, pooled: float, outcomes: dict[str, SimulationResult]) -> tuple[str, list[bool]]:
    """(line of the table, which targets are reached: p90, p99, goodput, imbalance, p90 10% below the best other)."""
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
        check_traces(traces, dict.fromkeys(FILES[cell.trace] for cell in cells if cell.trace in FILES))
        known = _read(json_path, routers)
    except InvalidConfig as error:
        sys.exit(fail(str(error), 2))
    began = time.perf_counter()
    parsed = {cell.name: _parse(cell, known[cell.name]) for cell in cells if cell.name in known}
    others = {name: {r: o for r, o in outcomes.items() if r != OURS} for name, (_, _, outcomes) in parsed.items()}
    if ours:
        parsed = {}
    results, tally = dict(known), [0] * 5
    columns = "cell", "TTFT p90: ours / best other", "ratio", "p99", "ratio", "hits: ours / pooled", "max/mean work"
    print("| " + " | ".join((*columns, "goodput", "success")) + " |\n|" + "---|" * 9)
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
    names = ("p90 at or below", "p99 within 2%", "goodput at or above", "work at most 1.15", "p90 10% below")
    print(f"of {len(cells)}: " + ", ".join(f"{name} in {count}" for name, count in zip(names, tally, strict=True)))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
