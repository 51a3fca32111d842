"""How fast and how exact a model with quantised weights is, compared with bfloat16: one checkpoint, one run.

    python bench/quantised.py [--json bench/results/quantised.json]

Speed is measured with a llama of 0.48B parameters and random weights. Rounds alternate between the forms, so that a
busy moment of the machine slows all. A figure is the median of its best round. Perplexity is that of the demo model on
its held-out text; `bench/kv_cases/dtype.py` measures it for quantised KV pools. Weights are quantised as by
`--quantization`.

`--activations` measures the perplexity with quantised activations, and no speed, because CPUs do not serve them. It
uses transformers' model in float32, and rounds the inputs of linears as kernels/layers/quantised_rows.py does.
"""

import math
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from coatcheck.bench.engine_cases.contestants import Coatcheck
from coatcheck.bench.kv_cases.dtype import WINDOW, perplexity
from coatcheck.bench.setup.checkpoint import COMMON_FIELDS, VOCABULARY, write_checkpoint
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows_reference
from coatcheck.kernels.layers.quantised_weight import CodeKind, quantise
from coatcheck.kernels.native import native_status
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model

FORMS: Final = ("auto", "int8", "int4", "fp8")
TARGETS: Final = {"int8": 1.4, "int4": 1.8}  # of a decode step of one sequence
BATCHES: Final = (1, 8)
CONTEXT: Final = 128
PROMPT: Final = 512


@dataclass(slots=True)
class FormFigures:
    """One form of the weights. `ms`: milliseconds by case. `perplexity`: of the demo model; 0 if it was not
    measured."""

    form: str
    weight_bytes: int
    ms: dict[str, float]
    perplexity: float = 0.0


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 3,
    steps: Annotated[int, typer.Option(min=3, help="Decode steps per round.")] = 12,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    most_tokens: Annotated[int, typer.Option(help="Tokens of the held-out text to use, at most; 0: none.")] = 45_000,
    activations: Annotated[bool, typer.Option("--activations", help="Perplexity of quantised ones only.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Compare quantised weights with bfloat16."""
    torch.set_num_threads(threads)
    if activations:
        found = rounded_perplexities(most_tokens)
        Console().print(table_of_rounded(found))
        write_results(json_path, {**describe_machine(), "tokens": most_tokens, "perplexity": found})
        return
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint(checkpoint or Path(scratch) / "llama-0.5b")
        contestants = {form: Coatcheck(directory, quantization=form) for form in FORMS}
        rows = [FormFigures(form, one.weight_bytes, {}) for form, one in contestants.items()]
        for index in range(rounds + 1):  # the first round warms all and is not counted
            for row, one in zip(rows, contestants.values(), strict=True):
                for what, milliseconds in measure(one, steps, seed=index).items():
                    if index:
                        row.ms[what] = min(milliseconds, row.ms.get(what, milliseconds))
    if most_tokens:
        for row in rows:
            row.perplexity = demo_perplexity(row.form, most_tokens)
    Console().print(as_table(rows))
    facts: dict[str, Any] = dict(describe_machine(), threads=threads, rounds=rounds, steps=steps)
    write_results(json_path, facts | {"kernels": native_status(), "rows": [asdict(row) for row in rows]})


def measure(one: Coatcheck, steps: int, seed: int) -> dict[str, float]:
    """Milliseconds of a decode step with each batch, and of a prefill."""
    random = np.random.default_rng(seed)
    found = {}
    for batch in BATCHES:
        prompts = random.integers(0, VOCABULARY, (batch, CONTEXT)).tolist()
        found[f"decode, batch {batch}"] = statistics.median(one.decode(prompts, steps)) * 1e3
    found[f"prefill of {PROMPT}"] = one.prefill(random.integers(0, VOCABULARY, PROMPT).tolist()) * 1e3
    return found


def demo_perplexity(form: str, most_tokens: int) -> float:
    """The demo model's perplexity on text that it was not trained on, with a KV pool of the model's dtype."""
    demo = Path("demo")
    model = load_model(demo / "model", communicator=Communicator(), device="cpu", quantization=form)
    tokenizer = Tokenizer.from_file(str(demo / "model" / "tokenizer.json"))
    ids = tokenizer.encode((demo / "heldout.txt").read_text("utf-8")).ids[:most_tokens]
    return perplexity(model, ids, choose_kv_dtype("auto", model.spec.dtype))


# Weights with a scale for each row, and columns that share a scale of the activations: 0 for a token's whole row; None:
# activations are kept.
ROUNDED: Final = (
    (CodeKind.INT8, None), (CodeKind.INT8, 0), (CodeKind.FP8, None), (CodeKind.FP8, 0), (CodeKind.FP8, 128)
)  # fmt: skip


def rounded_perplexities(most_tokens: int) -> dict[str, float]:
    """The demo model's perplexity in float32, by how weights and activations are rounded. The head is not rounded."""
    demo = Path("demo")
    tokenizer = Tokenizer.from_file(str(demo / "model" / "tokenizer.json"))
    ids = tokenizer.encode((demo / "heldout.txt").read_text("utf-8")).ids[:most_tokens]
    found = {}
    for name, kind, group in (("float32", None, None), *((_name(*pair), *pair) for pair in ROUNDED)):
        model: Any = AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32)
        if kind is not None:
            _round_linears(model.model, kind, group)
        found[name] = _perplexity_of(model, ids)
    return found


def _name(kind: CodeKind, group: int | None) -> str:
    columns = {None: "kept", 0: "a scale per token"}.get(group, f"a scale per {group} columns of a token")
    return f"{kind.name.lower()}, activations: {columns}"


def _round_linears(module: torch.nn.Module, kind: CodeKind, group: int | None) -> None:
    for linear in module.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.data = quantise(linear.weight.data, kind).dequantise()
            if group is not None:
                linear.register_forward_pre_hook(partial(_round_input, RowFormat(kind, group)))


def _round_input(format: RowFormat, module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (x,) = arguments
    return quantise_rows_reference(x.flatten(0, -2), format).dequantise().view(x.shape)


@torch.inference_mode()
def _perplexity_of(model: Any, ids: list[int]) -> float:
    """Perplexity over whole windows of text, as in kv_cases/dtype.py."""
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, 1, WINDOW)
    losses = [F.cross_entropy(model(window).logits[0, :-1], window[0, 1:]) for window in windows]
    return math.exp(torch.stack(losses).mean())


def table_of_rounded(found: dict[str, float]) -> Table:
    table = Table(title="Perplexity of the demo model, computed by transformers in float32")
    for name in ("weights per row", "perplexity", "change"):
        table.add_column(name, justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.3f}", f"{value / found['float32'] - 1:+.2%}")
    return table


def make_checkpoint(directory: Path) -> Path:
    """Write the checkpoint (1 GB) with random weights and a tokenizer unless it exists."""
    config = LlamaConfig(
        num_hidden_layers=24,
        hidden_size=1280,
        num_attention_heads=20,
        num_key_value_heads=4,
        intermediate_size=4096,
        max_position_embeddings=2048,
        **COMMON_FIELDS,
    )
    return write_checkpoint(config, directory)


def as_table(rows: list[FormFigures]) -> Table:
    plain = rows[0]
    table = Table(title=f"0.48B llama, {native_status()}: milliseconds, and how often as fast as bfloat16")
    for name in ("weights", "MB", *plain.ms, "perplexity", "change"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{ms:.1f} ({plain.ms[what] / ms:.2f}×)" for what, ms in row.ms.items()]
        change = f"{row.perplexity / plain.perplexity - 1:+.2%}" if plain.perplexity else ""
        name = "bfloat16" if row.form == "auto" else row.form
        wanted = f" (≥ {TARGETS[row.form]}×)" if row.form in TARGETS else ""
        table.add_row(name + wanted, f"{row.weight_bytes / 1e6:.0f}", *times, f"{row.perplexity:.3f}", change)
    return table


if __name__ == "__main__":
    typer.run(main)
