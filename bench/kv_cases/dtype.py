"""Capacity, perplexity and time of attention with each KV dtype on this CPU.

    python bench/kv_cases/dtype.py [--model demo/model] [--text demo/heldout.txt] [--json bench/results/kv_dtype.json]

Perplexity is that of the model on the text, in windows of 512 tokens computed in chunks of 128, so that most keys and
values are read back from the pool. Attention's shapes are those of bench/kernels.py, over pools larger than the caches;
the dtypes take turns, and a figure is the shortest run.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.roof import best_seconds
from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.native import native_status
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.core.kv_dtype import KvDtype, choose_kv_dtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool, make_layer_caches

KINDS = ("auto", "fp8", "int8", "int4")
WINDOW, CHUNK, BLOCK = 512, 128, 16
CPU = torch.device("cpu")
# (sequences, queries of each, context)
SHAPES = ((32, 1, 256), (1, 1, 8192), (1, 512, 2048))
LAYERS = tuple(LayerSpec(12, 4, 64) for _ in range(12))


@dataclass(slots=True)
class DtypeFigures:
    """One KV dtype. `capacity`: tokens in the same memory, over those of the model's dtype. `change`: of perplexity,
    relative. `attention_us`: of a call, by shape."""

    kv_dtype: str
    bytes_per_token: float
    capacity: float
    perplexity: float
    change: float
    attention_us: dict[str, float] = field(default_factory=dict)


@torch.inference_mode()
def perplexity(model: Model, ids: list[int], kv_dtype: KvDtype) -> float:
    layout = BlockLayout.of(model.spec.layers, BLOCK, kv_dtype)
    caches = make_layer_caches(layout, allocate_kv_pool(layout, WINDOW // BLOCK, CPU))
    tables = torch.arange(WINDOW // BLOCK, dtype=torch.int32)[None]
    loss, count = 0.0, 0
    for at in range(0, len(ids) - WINDOW + 1, WINDOW):
        window = torch.tensor(ids[at : at + WINDOW])
        hidden = []
        for first in range(0, WINDOW, CHUNK):
            span = torch.arange(first, first + CHUNK)
            lens = torch.tensor([first + CHUNK], dtype=torch.int32)
            starts = torch.tensor([0, CHUNK], dtype=torch.int32)
            metadata = AttentionMetadata(span, tables, lens, starts)
            hidden.append(model.forward(window[span], span, metadata, caches))
        logits = model.logits(torch.cat(hidden)[:-1])
        loss += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += WINDOW - 1
    return math.exp(loss / count)


@dataclass(slots=True)
class Attention:
    """One shape over one kind of pool, filled with noise; a run is a call for each layer."""

    caches: list[KVCache]
    q: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    q_len: int

    @classmethod
    def over(cls, kv_dtype: KvDtype, sequences: int, q_len: int, context: int) -> "Attention":
        blocks = sequences * context // BLOCK
        layout = BlockLayout.of(LAYERS, BLOCK, kv_dtype)
        caches = make_layer_caches(layout, allocate_kv_pool(layout, blocks, CPU))
        for cache in caches:
            for part in (cache.k, cache.v):
                bytes_ = torch.randint(0, 120, (*part.shape[:3], part.shape[3] * part.itemsize), dtype=torch.uint8)
                part.copy_(bytes_.view(part.dtype) if cache.is_quantised else torch.randn(part.shape))
            for scales in (cache.k_scales, cache.v_scales):
                if scales is not None:
                    scales.fill_(0.01)
        lengths = torch.full((sequences,), context, dtype=torch.int32)
        starts = (torch.arange(sequences + 1) * q_len).int()
        q = torch.randn(sequences * q_len, 12, 64).bfloat16()
        return cls(caches, q, torch.randperm(blocks).view(sequences, -1).int(), lengths, starts, q_len)

    def __call__(self) -> None:
        for cache in self.caches:
            paged_attention(
                self.q,
                cache,
                block_tables=self.tables,
                seq_lens=self.lengths,
                cu_seqlens_q=self.starts,
                scale=0.125,
            )


def measure_attention(rows: list[DtypeFigures], kinds: list[KvDtype], rounds: int) -> None:
    for shape in SHAPES:
        calls = [Attention.over(kind, *shape) for kind in kinds]
        best = [math.inf] * len(calls)
        for _ in range(rounds):
            best = [min(seconds, best_seconds(call, 3)) for seconds, call in zip(best, calls, strict=True)]
        for row, seconds in zip(rows, best, strict=True):
            row.attention_us["{} x {} of {}".format(*shape)] = seconds / len(LAYERS) * 1e6


def main(
    model: Annotated[Path, typer.Option(help="A checkpoint.")] = Path("demo/model"),
    text: Annotated[Path, typer.Option(help="A text that the model was not trained on.")] = Path("demo/heldout.txt"),
    most_tokens: Annotated[int, typer.Option(help="Tokens of the text to use, at most.")] = 45_000,
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of three runs of each dtype.")] = 6,
    out: Annotated[Path | None, typer.Option("--json", help="Where to save the figures.")] = None,
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    loaded = load_model(model, communicator=Communicator(), device="cpu")
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text.read_text("utf-8")).ids[:most_tokens]
    kinds = [choose_kv_dtype(kind, loaded.spec.dtype) for kind in KINDS]
    sizes = [BlockLayout.of(loaded.spec.layers, BLOCK, kind).bytes_per_token for kind in kinds]
    found = [perplexity(loaded, ids, kind) for kind in kinds]
    rows = [
        DtypeFigures(kind, size, sizes[0] / size, one, one / found[0] - 1)
        for kind, size, one in zip(kinds, sizes, found, strict=True)
    ]
    measure_attention(rows, [choose_kv_dtype(kind, "bfloat16") for kind in KINDS], rounds)
    table = Table("pool", "bytes a token", "capacity", "perplexity", "change", *rows[0].attention_us)
    for row in rows:
        times = [f"{us:.0f} us" for us in row.attention_us.values()]
        table.add_row(row.kv_dtype, f"{row.bytes_per_token:.0f}", f"{row.capacity:.2f}", f"{row.perplexity:.3f}",
                      f"{row.change:+.3%}", *times)  # fmt: skip
    console = Console()
    console.print(f"{native_status()}, {threads} threads; {len(ids) // WINDOW * WINDOW} tokens of {text}")
    console.print(table)
    facts = dict(machine=describe_machine(), threads=threads, kernels=native_status())
    write_results(out, facts | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    typer.run(main)
