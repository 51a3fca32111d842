"""A decode step over latents (MLA), in the absorbed and in the expanded form, and what the cache stores for a token.

    python -m coatcheck.bench.engine_cases.latent [--json FILE]

One layer with DeepSeek-V3's sizes and some of its 128 heads, one sequence, bfloat16, on a CPU: from the heads' queries
to their outputs. The absorbed form attends to the latents. The expanded form computes the keys and values of the
context from them first, as each step has to if only latents are stored. Bytes are those of one layer and 128 heads.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.kernels.attention.latent_attention import expanded_attention, latent_attention
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.layers.heads_linear import HeadsLinear
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout

RANK: Final = 512
NOPE, ROPE, VALUE = 128, 64, 128
ALL_HEADS: Final = 128
BLOCK: Final = 16
LENGTHS: Final = (512, 2048, 8192)
LAYERS: Final = {
    "latents": LayerSpec(ALL_HEADS, 1, RANK + ROPE, v_head_dim=0, rope_head_dim=ROPE),
    "heads": LayerSpec(ALL_HEADS, ALL_HEADS, NOPE + ROPE, v_head_dim=VALUE),
}


@dataclass(frozen=True, slots=True)
class LatentFigures:
    """Milliseconds of the fastest step of one sequence of `length` tokens."""

    length: int
    absorbed_ms: float
    expanded_ms: float


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Heads of this rank.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; a figure is that of the fastest.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure decode steps over latents in both forms."""
    torch.set_num_threads(threads)
    rows = [measure(length, heads, rounds) for length in LENGTHS]
    stored = {name: BlockLayout.of([layer], BLOCK, KvDtype.BFLOAT16).bytes_per_token for name, layer in LAYERS.items()}
    Console().print(as_table(rows))
    Console().print(f"bytes per token and layer: {stored['latents']:,} of latents, {stored['heads']:,} of 128 heads")
    facts = dict(describe_machine(), threads=threads, heads=heads, bytes_per_token=stored)
    write_results(json_path, facts | {"rows": [asdict(row) for row in rows]})


def measure(length: int, heads: int, rounds: int) -> LatentFigures:
    blocks = -(-length // BLOCK)
    dtype, scale = torch.bfloat16, (NOPE + ROPE) ** -0.5
    parts = (torch.randn(blocks, 1, BLOCK, size).to(dtype) for size in (RANK, ROPE))
    cache = LatentCache(*parts)
    up = (torch.randn(heads, NOPE + VALUE, RANK) / RANK**0.5).to(dtype)
    k_up_absorbed, k_up, v_up = (
        HeadsLinear(weight) for weight in (up[:, :NOPE].transpose(1, 2), up[:, :NOPE], up[:, NOPE:])
    )
    q = torch.randn(1, heads, NOPE + ROPE).to(dtype)
    tables = torch.randperm(blocks).to(torch.int32)[None]

    def absorbed() -> Tensor:
        wide = q.new_empty((1, heads, RANK + ROPE))
        k_up_absorbed(q[:, :, :NOPE], wide[:, :, :RANK])
        wide[:, :, RANK:] = q[:, :, NOPE:]
        lengths = torch.tensor([length], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        return v_up(
            latent_attention(wide, cache, block_tables=tables, seq_lens=lengths, cu_seqlens_q=starts, scale=scale)
        )

    def expanded() -> Tensor:
        latents, rope_keys = cache.rows(tables[0].long(), dtype)
        shared = latents[:length, None].expand(-1, heads, -1)
        kv = q.new_empty((length, heads, NOPE + VALUE))
        k_up(shared, kv[:, :, :NOPE])
        v_up(shared, kv[:, :, NOPE:])
        return expanded_attention(q, kv, rope_keys[:length], NOPE, scale)

    torch.testing.assert_close(absorbed(), expanded(), rtol=0.1, atol=0.05)
    times: dict[Callable[[], Tensor], list[float]] = {absorbed: [], expanded: []}
    for _ in range(rounds):
        for step, seconds in times.items():
            before = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - before)
    return LatentFigures(length, min(times[absorbed]) * 1e3, min(times[expanded]) * 1e3)


def as_table(rows: list[LatentFigures]) -> Table:
    table = Table("context", "absorbed ms", "expanded ms", "ratio")
    for row in rows:
        ratio = row.expanded_ms / row.absorbed_ms
        table.add_row(f"{row.length:,}", f"{row.absorbed_ms:.2f}", f"{row.expanded_ms:.2f}", f"{ratio:.0f}")
    return table


if __name__ == "__main__":
    typer.run(main)
