"""What clients see while everything is killed: streams started, ended, failed, changed.

    python bench/chaos.py --kills 200 [--json bench/results/chaos.json]

Two groups of two ranks on a Ray of their own, a small llama in float32, and streams of every kind of sampling. Ranks,
rank 0, whole groups, the router, the supervisor and `coatcheck serve` are killed with kill -9, and ranks stopped, half
of the time during a prefill or another failover. Every stream is compared with an undisturbed run.
"""

import asyncio
import json
import random
import time
from collections import Counter
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from coatcheck.bench.chaos_cluster import ChaosCluster
from coatcheck.bench.chaos_load import ChaosLoad, cases
from coatcheck.bench.chaos_strike import KINDS, MOMENTS, Strike, Striker
from coatcheck.bench.checkpoint import VOCABULARY, train_tokenizer
from coatcheck.bench.machine import describe_machine


def main(
    kills: Annotated[int, typer.Option(min=1, help="Processes to kill or stop.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each choice.")] = 160,
    seconds: Annotated[float, typer.Option(help="No kill after so long.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Of who is struck.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Kill everything, again and again, and compare."""
    console = Console()
    with TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        checkpoint = make_small_checkpoint(scratch / "llama-small")
        with ChaosCluster(checkpoint, scratch) as cluster:
            figures = asyncio.run(run(cluster, console, kills, streams, tokens, seconds, random.Random(seed)))
    console.print(as_table(figures))
    for fault in figures["faults"]:
        console.print(fault, soft_wrap=True, markup=False)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


async def run(
    cluster: ChaosCluster,
    console: Console,
    kills: int,
    streams: int,
    tokens: int,
    seconds: float,
    rng: random.Random,
) -> dict[str, Any]:
    """So many kills of every kind in turn, then the figures."""
    load = ChaosLoad(cluster.address, cases(VOCABULARY, tokens))
    striker = Striker(cluster, load, rng)
    await load.learn()
    console.print(f"{len(load.requests)} cases are known")
    began = time.monotonic()
    keeping = asyncio.create_task(load.keep(streams))
    made: list[Strike] = []
    for turn in count():
        if len(made) >= kills or time.monotonic() - began > seconds:
            break
        kind, moment = KINDS[turn % len(KINDS)], MOMENTS[turn % len(MOMENTS)]
        try:
            made += await striker.strike(kind, moment)
        except (TimeoutError, RuntimeError) as error:
            load.faults.append(f"{kind}, {moment}: {error}")
            break
        said = " ".join(f"{load.counts[name]} {name}" for name in ("started", "ended", "failed", "changed", "refused"))
        console.print(f"{time.monotonic() - began:6.1f} s  {len(made)} kills  {kind}, {moment}: "
                      f"stall {made[-1].longest_stall:.1f} s; {said}", highlight=False)  # fmt: skip
    load.stop()
    await asyncio.wait_for(keeping, 300)
    await load.close()
    return {
        "machine": describe_machine(),
        "kills": len(made),
        "seconds": round(time.monotonic() - began, 1),
        **{name: load.counts[name] for name in ("started", "ended", "failed", "changed", "refused", "moved")},
        "by_kind": {kind: _of_kind([strike for strike in made if strike.kind == kind]) for kind in KINDS},
        "moments": dict(Counter(strike.moment for strike in made)),
        "stopped_rank_found_seconds": [round(value, 2) for value in striker.found],
        "faults": load.faults,
    }


def as_table(figures: dict[str, Any]) -> Table:
    """The counts, and how long streams stood still."""
    names = ("kills", "started", "ended", "failed", "changed", "refused", "moved")
    table = Table(*names, title="streams while everything is killed")
    table.add_row(*(str(figures[name]) for name in names))
    return table


def make_small_checkpoint(directory: Path) -> Path:
    """A llama in float32 whose prefill of a long prompt takes a few steps, and whose logits are no near ties."""
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


def _of_kind(strikes: list[Strike]) -> dict[str, float]:
    stalls = sorted(strike.longest_stall for strike in strikes)
    if not stalls:
        return {"kills": 0}
    return {
        "kills": len(stalls),
        "median_stall": round(stalls[len(stalls) // 2], 2),
        "longest_stall": round(stalls[-1], 2),
    }


if __name__ == "__main__":
    typer.run(main)
