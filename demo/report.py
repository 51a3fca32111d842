"""Shows the quality of the demo checkpoint: perplexity on the held-out text, answers, and the curve of its training.

Reads a checkpoint directory and the CSV file of `train.py --curve`. README.md quotes the output.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from train import HERE, MODEL, held_out_loss
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

QUESTIONS = (
    "What does `str.startswith` do?",
    "Write a function `read_lines`: Read a file and return a list of its lines.",
    "What does the module `queue` do?",
)
OPENING = "import os\n\n\ndef read_lines(path):"


def plot(curve: Path, image: Path) -> None:
    """The loss against tokens, small enough to commit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with curve.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    held = [row for row in rows if not math.isnan(row["held_out_loss"])]
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot([r["tokens"] / 1e6 for r in rows], [r["loss"] for r in rows], label="training (running mean)")
    axes.plot([r["tokens"] / 1e6 for r in held], [r["held_out_loss"] for r in held], "o-", ms=3, label="held out")
    axes.set(xlabel="million tokens", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=90)


@torch.no_grad()
def report(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.", show_default="demo/model")] = MODEL,
    curve: Annotated[Path | None, typer.Option(help="The CSV file of train.py --curve; draws demo/loss.png.")] = None,
    temperature: Annotated[float, typer.Option(help="Zero is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Print the held-out perplexity of a checkpoint and a few of its answers."""
    torch.manual_seed(seed)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = (HERE / "heldout.txt").read_text("utf-8")
    loss = held_out_loss(llama, tokenizer, text)
    count = len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    bits = loss * count / math.log(2) / len(text.encode())
    console.print(
        f"held-out: {count:,} tokens, loss {loss:.4f}, perplexity {math.exp(loss):.2f}, {bits:.3f} bits a byte"
    )

    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in asked]
    for prompt in [*prompts, "<|bos|>" + OPENING]:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        out = llama.generate(  # type: ignore[misc]  # transformers types `self` as a protocol that its models miss
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, **how
        )
        console.print("-" * 40 + f"\n{tokenizer.decode(out[0])}")
    if curve is not None:
        plot(curve, HERE / "loss.png")


if __name__ == "__main__":
    typer.run(report)
