"""Trains the small llama that the demo and the tests serve, on nothing but this interpreter's own library.

Writes a directory that plain `AutoModelForCausalLM` and `AutoTokenizer` load. Imports nothing of Coatcheck: the server
loads this checkpoint like any other. The text comes from `corpus.py`.
"""

from __future__ import annotations

import csv
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import corpus  # beside this script, which is not part of the package
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).parent
MODEL = HERE / "model"
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
BOS, EOS, PAD, END = 0, 1, 2, 6
VOCABULARY = 4096
LONGEST = 2048
BATCH_TOKENS = 2048
# Mostly short rows, which are cheaper and more varied; enough long ones that attention works to the last position.
ROW_LENGTHS, ROW_SHARES = (512, 1024, LONGEST), (0.80, 0.14, 0.06)
MUON_RATE, ADAM_RATE = 6e-3, 3e-3
WARMUP = 0.03  # share of the whole run

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any bytes round-trip, and runs of indentation become single tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model() -> LlamaForCausalLM:
    """3.8 million parameters, with two KV heads so that grouped attention and tensor parallelism have work to do."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=LONGEST,
        bos_token_id=BOS,
        eos_token_id=[EOS, END],
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    ends = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, END], pad_token_id=PAD)
    model.generation_config = ends
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the directory in bf16, through a copy: the weights that are being trained stay float32."""
    copy = build_model()
    copy.load_state_dict(model.state_dict())
    copy.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], chats: list[list[corpus.Message]]) -> list[list[int]]:
    """The token ids of each document: a plain text between BOS and EOS, a chat as its template marks it."""
    bpe = tokenizer.backend_tokenizer
    plain = bpe.encode_batch(texts, add_special_tokens=False)
    talks = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    talk_ids = bpe.encode_batch(talks, add_special_tokens=False)
    return [[BOS, *e.ids, EOS] for e in plain] + [e.ids for e in talk_ids]


def batches(documents: list[list[int]], draw: random.Random) -> Iterator[torch.Tensor]:
    """Endless batches of packed rows; each epoch shuffles the documents anew."""
    order = list(range(len(documents)))
    while True:
        draw.shuffle(order)
        stream = torch.tensor([token for i in order for token in documents[i]])
        for start in range(0, len(stream) - BATCH_TOKENS + 1, BATCH_TOKENS):
            length = draw.choices(ROW_LENGTHS, ROW_SHARES)[0]
            yield stream[start : start + BATCH_TOKENS].view(-1, length)


def next_token_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of each row's tokens after its first."""
    # 1.7 times as quick as float32 on a CPU with bf16 instructions (README.md); one without may be slower.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), rows[:, 1:].reshape(-1))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """Nats per token of the text in windows of 1023 tokens that do not overlap, each after a <|bos|>."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    total = 0.0
    for start in range(0, len(ids), 1023):
        window = ids[start : start + 1023]
        total += next_token_loss(model, torch.tensor([[BOS, *window]])).item() * len(window)
    return total / len(ids)


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up, then half a cosine down to nothing. `progress` runs from 0 to 1."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms, where Muon has no meaning."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(inner, lr=MUON_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
    ]


def train(
    minutes: Annotated[float, typer.Option(help="Wall-clock budget; the learning rate reaches zero as it ends.")] = 40,
    tokens: Annotated[int | None, typer.Option(help="A budget in tokens instead of minutes.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the checkpoint.", show_default="demo/model")] = MODEL,
    save_every: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 4,
    curve: Annotated[Path | None, typer.Option(help="Write the loss curve to this CSV file.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of documents.")] = 0,
) -> None:
    """Train the demo checkpoint from the Python standard library. No GPU and no network are needed.

    [bold]python demo/train.py[/bold] makes a llama of 3.8 million parameters in 40 minutes on two cores;
    [bold]python demo/train.py --minutes 8 --out /tmp/model[/bold] makes a rougher one.

    The learning rate follows the share of the budget that is used up. With a budget in minutes a loaded machine
    ends on time with fewer tokens; with one in [bold]--tokens[/bold] the same seed repeats the same run. The run
    also writes demo/heldout.txt, the text of the files that it never trains on, and prints the perplexity on it.
    Checkpoints hold weights only: a run cannot be resumed.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    disable_progress_bar()
    console = Console()
    read = corpus.load()
    (HERE / "heldout.txt").write_text(read.held_out, "utf-8")
    tokenizer = build_tokenizer(read.texts)
    documents = encode(tokenizer, read.texts, read.chats)
    model = build_model()
    optimizers = build_optimizers(model)
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {len(read.texts):,} files and {len(read.chats):,} "
        f"conversations, {sum(map(len, documents)):,} tokens; {len(read.held_out.encode()):,} bytes held out"
    )

    began = saved = time.monotonic()
    step, seen, average, progress = 0, 0, math.log(VOCABULARY), 0.0
    points: list[tuple[int, int, float, float]] = []
    feed = batches(documents, random.Random(seed))
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("", total=1.0)
        while progress < 1:
            scale = learning_rate_scale(progress)
            for group, rate in zip((g for o in optimizers for g in o.param_groups), base_rates, strict=True):
                group["lr"] = rate * scale
            rows = next(feed)
            loss = next_token_loss(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

            step, seen = step + 1, seen + rows.numel()
            average += (loss.item() - average) * max(0.02, 1 / step)
            now = time.monotonic()
            progress = seen / tokens if tokens else (now - began) / (60 * minutes)
            bar.update(task, completed=progress, description=f"step {step}  {seen:,} tokens  loss {average:.3f}")
            last = progress >= 1
            if last or now - saved > 60 * save_every:
                saved = now
                save(model, tokenizer, out)
            if last or step % 100 == 0:
                held = held_out_loss(model, tokenizer, read.held_out) if last or step % 300 == 0 else math.nan
                points.append((step, seen, average, held))
                spent = (now - began) / 60
                bar.console.print(f"{spent:6.1f} min  step {step}  loss {average:.4f}  held-out {held:.4f}")
                if curve is not None:
                    with curve.open("w", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerows(
                            [("step", "tokens", "loss", "held_out_loss"), *points]
                        )
    held = points[-1][3]
    console.print(f"held-out loss {held:.4f}, perplexity {math.exp(held):.2f}; saved in {out}")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)
    app.command()(train)
    app()
