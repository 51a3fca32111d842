"""Speed by reply length and batch size: no KV cache, transformers' contiguous cache, our paged cache.

    python bench/engine_cases/reply_length.py [--json bench/results/kv.json] [--plot bench/results/kv.png]

The 82M checkpoint, one process, the same threads. Without a cache every step computes the whole sequence again.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from coatcheck.bench.engine_cases.contestants import Coatcheck, Contestant, Transformers
from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.results_file import update_results

_PROMPT = 32
_REPLIES = (16, 64, 256)
_BATCHES = (1, 4, 16, 32)
_STEPS = 16


class Naive:
    """transformers without a cache, one sequence."""

    def __init__(self, checkpoint: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def reply(self, prompt: list[int], length: int) -> float:
        """Seconds of a greedy reply."""
        tokens = torch.tensor([prompt])
        started = time.perf_counter()
        for _ in range(length):
            logits = self._model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return time.perf_counter() - started


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads of all three.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw both tables; needs matplotlib.")] = None,
) -> None:
    """Measure both tables."""
    torch.set_num_threads(threads)
    with TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(Path(scratch) / "llama-82m", 1024)
        naive, contiguous, paged = Naive(checkpoint), Transformers(checkpoint), Coatcheck(checkpoint)
        for warm in (contiguous, paged):
            warm.decode([_prompt(9)], 2)
        replies = [_reply(naive, contiguous, paged, length) for length in _REPLIES]
        batches = [_batch(contiguous, paged, batch) for batch in _BATCHES]
    for rows in (replies, batches):
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(f"{value:,.2f}" for value in row.values()))
        Console().print(table)
    update_results(json_path, replies={"rows": replies}, batches={"rows": batches})
    if plot is not None:
        _draw(replies, batches, plot)


def _prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCABULARY, (_PROMPT,), generator=generator).tolist()
    return ids


def _reply(naive: Naive, contiguous: Contestant, paged: Contestant, length: int) -> dict[str, float]:
    prompt = _prompt(length)
    without = naive.reply(prompt, length)
    seconds = [one.prefill(prompt) + sum(one.decode([prompt], length - 1)) for one in (contiguous, paged)]
    return {
        "reply tokens": float(length),
        "no cache s": without,
        "contiguous s": seconds[0],
        "paged s": seconds[1],
        "no cache / contiguous": without / seconds[0],
        "no cache / paged": without / seconds[1],
    }


def _batch(contiguous: Contestant, paged: Contestant, batch: int) -> dict[str, float]:
    prompts = [_prompt(seed) for seed in range(batch)]
    steps = [statistics.median(one.decode(prompts, _STEPS)) for one in (contiguous, paged)]
    return {
        "batch": float(batch),
        "contiguous ms/step": steps[0] * 1e3,
        "paged ms/step": steps[1] * 1e3,
        "contiguous tokens/s": batch / steps[0],
        "paged tokens/s": batch / steps[1],
    }


def _draw(replies: list[dict[str, float]], batches: list[dict[str, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for axes, rows, x, names, unit in (
        (panels[0], replies, "reply tokens", ("no cache s", "contiguous s", "paged s"), "seconds"),
        (panels[1], batches, "batch", ("contiguous ms/step", "paged ms/step"), "ms a decode step"),
        (panels[2], batches, "batch", ("contiguous tokens/s", "paged tokens/s"), "tokens/s"),
    ):
        for name in names:
            axes.plot([row[x] for row in rows], [row[name] for row in rows], marker="o", label=name.split()[0])
        axes.set(xlabel=x, ylabel=unit, ylim=(0, None))
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
