"""What clients see while processes are killed: how many streams start, end, fail, or change their tokens.

    python bench/chaos.py --kills 200 [--json bench/results/chaos.json]

Two groups of two ranks serve a small llama in float32, on a Ray cluster of three nodes. Streams use every kind of
sampling. Ranks, rank 0, whole groups, the router, the supervisor, `coatcheck serve` and whole nodes are killed with
kill -9, and ranks are also stopped. Half of this happens during a prefill, a restore from host memory or another
failover. Every stream is compared with an undisturbed run. The figures are written after every kill, so that an
interrupted run has them too.
"""

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from coatcheck.bench.failure_cases.chaos_cluster import ChaosCluster
from coatcheck.bench.failure_cases.chaos_load import ChaosLoad, cases
from coatcheck.bench.failure_cases.chaos_strike import MOMENTS, Strike, Striker
from coatcheck.bench.setup.checkpoint import VOCABULARY, train_tokenizer
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.results_file import describe_machine, write_results

_COUNTS = ("started", "ended", "failed", "changed", "refused", "moved")


def main(
    kills: Annotated[int, typer.Option(min=1, help="Processes to kill or stop.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each choice.")] = 160,
    seconds: Annotated[float, typer.Option(help="No kill after this many seconds.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice of victims.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Kill processes of a serving cluster and compare every stream with an undisturbed run."""
    # SIGTERM must unwind the context managers, which end Ray.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    with TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        checkpoint = make_small_checkpoint(scratch / "llama-small")
        with ChaosCluster(checkpoint, scratch) as cluster:
            figures = asyncio.run(
                run(cluster, console, kills, streams, tokens, seconds, random.Random(seed), json_path)
            )
    console.print(as_table(figures))
    for fault in figures["faults"]:
        console.print(fault, soft_wrap=True, markup=False)
    raise typer.Exit(1 if figures["faults"] else 0)


async def run(
    cluster: ChaosCluster,
    console: Console,
    kills: int,
    streams: int,
    tokens: int,
    seconds: float,
    rng: random.Random,
    json_path: Path | None,
) -> dict[str, Any]:
    """Kill processes until there were `kills` kills or `seconds` have passed. Returns the figures."""
    load = ChaosLoad(cluster.address, cases(VOCABULARY, tokens))
    await load.learn()
    striker = Striker(cluster, load, rng)
    console.print(f"{len(load.requests)} cases are known", highlight=False)
    began = time.monotonic()
    keeping = asyncio.create_task(load.keep_streams(streams))
    made: list[Strike] = []
    for kind, moment in plan_strikes(cluster.kinds, rng):
        if len(made) >= kills or time.monotonic() - began > seconds:
            break
        try:
            made += await striker.strike(kind, moment)
        except (TimeoutError, RuntimeError) as error:
            load.faults.append(f"{kind}, {moment}: {error}")
            break
        figures = figures_of(load, striker, made, time.monotonic() - began)
        summary = f"stall {made[-1].longest_stall:.1f} s; " + " ".join(f"{figures[name]} {name}" for name in _COUNTS)
        console.print(
            f"{figures['seconds']:6.1f} s  {len(made)} kills  {kind}, {moment}: {summary}",
            highlight=False,
            soft_wrap=True,
        )
        write_results(json_path, figures)
    load.stop()
    await asyncio.wait_for(keeping, MAX_WAIT_SECONDS)
    await load.close()
    figures = figures_of(load, striker, made, time.monotonic() - began)
    write_results(json_path, figures)
    return figures


def plan_strikes(kinds: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (kind, moment) pairs without end. The kinds take turns. A kind gets every moment before one repeats."""
    while True:
        moments = {kind: rng.sample(MOMENTS, len(MOMENTS)) for kind in kinds}
        for turn in range(len(MOMENTS)):
            for kind in kinds:
                yield kind, moments[kind][turn]


def figures_of(load: ChaosLoad, striker: Striker, made: list[Strike], seconds: float) -> dict[str, Any]:
    kinds = dict.fromkeys(strike.kind for strike in made)
    return {
        "machine": describe_machine(),
        "kills": len(made),
        "seconds": round(seconds, 1),
        **{name: load.counts[name] for name in _COUNTS},
        "kinds": dict(Counter(strike.kind for strike in made)),
        "stalls": {kind: _stalls(one for one in made if one.alone and one.kind == kind) for kind in kinds},
        "stalls_amid_another_failover": _stalls(one for one in made if one.moment == "failover"),
        "moments": dict(Counter(strike.moment for strike in made)),
        "stopped_rank_found_seconds": [round(value, 2) for value in striker.found],
        "faults": load.faults,
    }


def as_table(figures: dict[str, Any]) -> Table:
    names = ("kills", *_COUNTS)
    table = Table(*names, title="streams while everything is killed")
    table.add_row(*(str(figures[name]) for name in names))
    return table


def make_small_checkpoint(directory: Path) -> Path:
    """A llama in float32 whose prefill of a long prompt takes a few steps, and whose logits have no near ties."""
    train_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


def _stalls(strikes: Iterable[Strike]) -> dict[str, float]:
    stalls = sorted(strike.longest_stall for strike in strikes)
    if not stalls:
        return {"strikes": 0}
    return {
        "strikes": len(stalls),
        "median_seconds": round(stalls[len(stalls) // 2], 2),
        "longest_seconds": round(stalls[-1], 2),
    }


if __name__ == "__main__":
    typer.run(main)
