"""Cached prompt blocks and TTFT by eviction policy and pool size, and the number of sequences that fit.

    python bench/kv.py hits|ttft|lengths [--traces DIR] [--json bench/results/kv.json]

`hits` and `ttft` replay Mooncake's traces through the server's own pool. `lengths` uses the lengths of Azure's trace.
public_traces.py says where to get the traces. `hits` evicts by reuse rate alone, `ttft` by reuse rate times the time to
compute a block.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coatcheck.bench.kv_cases.trace_replay import (
    CAPACITIES,
    CROSSOVER_BLOCKS,
    TRACES,
    Hits,
    count_found,
    fitting,
    gap_closed,
    mean_ttft,
    optimum,
    read_trace,
    replay,
)
from coatcheck.bench.setup.public_traces import AZURE, FOLDER, Traces, check_traces
from coatcheck.bench.setup.results_file import update_results
from coatcheck.cluster.command import fail
from coatcheck.cluster.planner.lengths import LengthDistribution
from coatcheck.proto.errors import InvalidConfig

_CONTEXT = 8192
_POOL_TOKENS = 450_560  # of 55 sequences of 8,192 tokens: an 8B llama in bf16 beside its weights on 80 GiB
_BLOCK_SIZES = (8, 16, 32, 64, 128)
_POLICIES = ("lru", "cost", "optimum")
_LOADS = (0.7, 0.95)  # of prefills without a cache


def main(
    what: Annotated[str, typer.Argument(help="hits, ttft or lengths.")],
    traces: Traces = FOLDER,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure one part."""
    if what not in ("hits", "ttft", "lengths"):
        raise typer.BadParameter(f"{what!r}: use hits, ttft or lengths")
    try:
        check_traces(traces, [AZURE] if what == "lengths" else map(_file, TRACES))
    except InvalidConfig as error:
        sys.exit(fail(str(error), 2))
    figures = lengths(traces) if what == "lengths" else (hits if what == "hits" else ttft)(traces, workers)
    update_results(json_path, **{what: {"rows": figures}})


def hits(traces: Path, workers: int) -> list[dict[str, Any]]:
    """The share of prompt blocks that are found in the cache, by trace, capacity and policy."""
    cells = [(traces, trace, capacity, policy) for trace in TRACES for capacity in CAPACITIES for policy in _POLICIES]
    with ProcessPoolExecutor(workers) as pool:
        found = dict(zip(cells, pool.map(_cell, cells), strict=True))
    table = Table("trace", "blocks", "lru %", "ours %", "optimum %", "gap closed %", "refused")
    rows: list[dict[str, Any]] = []
    for trace in TRACES:
        for capacity in CAPACITIES:
            lru, ours, best = (found[traces, trace, capacity, policy] for policy in _POLICIES)
            row = {
                "lru": lru.blocks,
                "ours": ours.blocks,
                "optimum": best.blocks,
                "closed": gap_closed(ours, lru, best),
            }
            refused = len(read_trace(traces / _file(trace))) - len(fitting(read_trace(traces / _file(trace)), capacity))
            rows.append({"trace": trace, "capacity": capacity, **row, "refused": refused})
            table.add_row(trace, str(capacity), *(f"{100 * share:.2f}" for share in row.values()), str(refused))
    Console().print(table)
    return rows


def ttft(traces: Path, workers: int) -> list[dict[str, Any]]:
    """Mean TTFT in seconds, by trace, capacity, load and policy, on a server that prefills one prompt at a time."""
    cells = [(traces, trace, capacity) for trace in TRACES for capacity in CAPACITIES]
    with ProcessPoolExecutor(workers) as pool:
        rows = [row for found in pool.map(_ttft_cell, cells) for row in found]
    table = Table("trace", "blocks", "load", "lru s", "reuse rate s", "with computing time s", "gain %")
    for row in rows:
        gain = f"{100 * (1 - row['cost'] / row['rate']):.1f}"
        seconds = (f"{row[policy]:.2f}" for policy in ("lru", "rate", "cost"))
        table.add_row(row["trace"], str(row["capacity"]), str(row["load"]), *seconds, gain)
    Console().print(table)
    return rows


def lengths(traces: Path) -> list[dict[str, Any]]:
    """How many whole sequences the same memory holds, as `coatcheck plan` computes it."""
    known = LengthDistribution.read(traces / AZURE, _CONTEXT)
    reserved = known.fit_reserved(_POOL_TOKENS, 1, _CONTEXT)
    table = Table("block size", "paged", f"{_CONTEXT} reserved", "times", "waste %")
    rows: list[dict[str, Any]] = []
    for size in _BLOCK_SIZES:
        paged, waste = known.fit_paged(_POOL_TOKENS // size, size), known.waste(size)
        rows.append({"block_size": size, "paged": paged, "reserved": reserved, "waste": waste})
        table.add_row(str(size), str(paged), str(reserved), f"{paged / reserved:.2f}", f"{100 * waste:.2f}")
    Console().print(table)
    return rows


def _file(trace: str) -> str:
    return f"{trace}.jsonl.gz"


def _cell(cell: tuple[Path, str, int, str]) -> Hits:
    traces, trace, capacity, policy = cell
    arrivals = fitting(read_trace(traces / _file(trace)), capacity)
    return optimum(arrivals, capacity) if policy == "optimum" else replay(arrivals, capacity, policy)


def _ttft_cell(cell: tuple[Path, str, int]) -> list[dict[str, Any]]:
    traces, trace, capacity = cell
    arrivals = fitting(read_trace(traces / _file(trace)), capacity)
    found = {
        "lru": count_found(arrivals, capacity, "lru"),
        "rate": count_found(arrivals, capacity, "cost"),
        "cost": count_found(arrivals, capacity, "cost", CROSSOVER_BLOCKS),
    }
    return [
        {"trace": trace, "capacity": capacity, "load": load}
        | {policy: mean_ttft(arrivals, counts, load) for policy, counts in found.items()}
        for load in _LOADS
    ]


if __name__ == "__main__":
    typer.run(main)
