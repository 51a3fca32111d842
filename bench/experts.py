"""How fast a mixture of experts is, compared with transformers: same weights, same threads, one run.

    python bench/experts.py [--json bench/results/experts.json]

The model is a small Qwen3-MoE: 64 experts, 8 for each token, 0.4B parameters, of which a token uses 0.07B. transformers
runs with each of its three implementations of experts: a loop over experts (eager), one product for each pair of token
and expert (batched_mm), and torch's grouped product (grouped_mm). Rounds alternate as in engine.py. A figure is the
median of its best round. `ratio` compares with the fastest implementation.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig

from coatcheck.bench.engine import EngineCase, measure
from coatcheck.bench.engine_cases.contestants import Coatcheck, Transformers
from coatcheck.bench.setup.checkpoint import COMMON_FIELDS, write_checkpoint
from coatcheck.bench.setup.results_file import describe_machine, write_results

FORMS = ("eager", "batched_mm", "grouped_mm")
CASES = (EngineCase(1, 128, 4.0), EngineCase(8, 128, 4.0), EngineCase(32, 128, 4.0), EngineCase(0, 512, 2.0))


@dataclass(frozen=True, slots=True)
class ExpertFigures:
    """One row's figures, in milliseconds. Those of transformers are by its implementation of experts."""

    what: str
    transformers_ms: dict[str, float]
    coatcheck_ms: float
    target: float

    @property
    def ratio(self) -> float:
        return min(self.transformers_ms.values()) / self.coatcheck_ms


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads of both.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds per row.")] = 2,
    steps: Annotated[int, typer.Option(min=3, help="Decode steps per round.")] = 8,
    form: Annotated[str, typer.Option(help="Of transformers' experts; default: all three in turn.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure a mixture of experts beside transformers."""
    torch.set_num_threads(threads)
    rows, forms = [], [form] if form else list(FORMS)
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint(checkpoint or Path(scratch) / "qwen3-moe-0.4b")
        ours = Coatcheck(directory)
        times: list[dict[str, float]] = [{} for _ in CASES]
        best = [float("inf")] * len(CASES)
        for kind in forms:
            theirs = Transformers(directory, experts_implementation=kind)
            for index, case in enumerate(CASES):
                their_best, our_best = measure(case, ours, theirs, rounds, steps)
                times[index][kind] = their_best * 1e3
                best[index] = min(best[index], our_best * 1e3)
                print(f"{case.title}: {kind} {their_best * 1e3:.1f} ms, coatcheck {our_best * 1e3:.1f} ms", flush=True)
            del theirs
        for case, their_ms, our_ms in zip(CASES, times, best, strict=True):
            rows.append(ExpertFigures(case.title, their_ms, our_ms, case.target))
    Console().print(as_table(rows, forms))
    facts: dict[str, Any] = dict(describe_machine(), threads=threads, rounds=rounds, steps=steps)
    write_results(json_path, facts | {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})


def make_checkpoint(directory: Path) -> Path:
    """Write the checkpoint (0.8 GB) with random weights and a tokenizer unless it exists."""
    config = Qwen3MoeConfig(
        num_hidden_layers=10,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        **COMMON_FIELDS,
    )
    return write_checkpoint(config, directory)


def as_table(rows: list[ExpertFigures], forms: list[str]) -> Table:
    table = Table(title="0.4B Qwen3-MoE, 64 experts, 8 for each token, bfloat16, milliseconds")
    for name in ("what", *(f"transformers, {form}" for form in forms), "coatcheck", "ratio", "to reach"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        style = "green" if row.ratio >= row.target else "red"
        theirs = (f"{row.transformers_ms[form]:.1f}" for form in forms)
        table.add_row(row.what, *theirs, f"{row.coatcheck_ms:.1f}", f"[{style}]{row.ratio:.2f}×[/]", f"≥ {row.target}×")
    return table


if __name__ == "__main__":
    typer.run(main)
