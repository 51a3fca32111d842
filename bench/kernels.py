"""How fast each CPU kernel is, compared with torch's way to do the same work and with the machine's limits.

    python bench/kernels.py [--threads 2] [--json bench/results/kernels.json]

The shapes are those of an 82M llama (hidden 768, 12 heads, 4 KV heads, head_dim 64, MLP 2048, vocabulary 8192, 12
layers) in bfloat16. Each call reads other copies of weights and KV, which together do not fit into the caches. Rounds
alternate between ours and torch's, so that a busy moment of the machine slows both. A figure is the shortest run. The
bound is bytes / measured read bandwidth, or operations / measured bf16 matrix rate, whichever is longer.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.roof import best_seconds, matrix_throughput, read_bandwidth
from coatcheck.kernels import huge_pages
from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.attention.rotary import rotary_and_store, rotary_and_store_reference
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.rms_norm import RmsNorm, rms_norm_reference
from coatcheck.kernels.layers.silu_mul import silu_mul, silu_mul_reference
from coatcheck.kernels.native import native_status
from coatcheck.kernels.sampling.sample import sample, sample_reference

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 12, 12, 4, 64, 16
COLD = 100 << 20  # bytes to cycle through: more than the caches hold


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`ours` and `theirs` do the same work, `times` times in each call."""

    what: str
    beside: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    times: int
    bytes_read: float
    operations: float


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One row's figures, in microseconds a call."""

    what: str
    beside: str
    ours_us: float
    theirs_us: float
    ratio: float
    bound_us: float
    share_of_bound: float


def linears() -> Iterator[KernelCase]:
    """The packed linear, compared with oneDNN's packed linear, which torch's inductor would use."""
    for features, depth in ((1280, 768), (4096, 768), (768, 2048), (8192, 768)):
        copies = max(2, COLD // (features * depth * 2))
        weights = [torch.randn(features, depth).bfloat16() for _ in range(copies)]
        packed = [PackedLinear(weight) for weight in weights]
        onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        for rows in (1, 8, 16, 32, 64, 512):
            x = torch.randn(rows, depth).bfloat16()

            def ours(x: Tensor = x, packed: list[PackedLinear] = packed) -> None:
                for linear in packed:
                    linear(x)

            def theirs(x: Tensor = x, onednn: list[Tensor] = onednn) -> None:
                for weight in onednn:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

            size = features * depth
            yield KernelCase(
                f"linear {depth} to {features}, {rows} rows",
                "oneDNN packed",
                ours,
                theirs,
                copies,
                size * 2,
                2 * size * rows,
            )


def attention() -> Iterator[KernelCase]:
    """Attention that reads the pool in place, compared with SDPA on keys and values that were gathered in advance."""
    for batch, q_len, context in ((1, 1, 256), (16, 1, 256), (32, 1, 256), (1, 1, 8192), (1, 512, 512), (1, 512, 2048)):
        blocks = -(-context // BLOCK)
        # On huge pages, as the pool of a rank is: its blocks are read in any order, each on another page.
        pool = huge_pages.zeros((batch * blocks, 2 * LAYERS, KV_HEADS, BLOCK, DIM), torch.bfloat16)
        pool.copy_(torch.randn(pool.shape))
        tables = torch.randperm(batch * blocks).view(batch, blocks).int()
        q = torch.randn(batch * q_len, HEADS, DIM).bfloat16()
        gathered = torch.randn(2 * LAYERS, batch, KV_HEADS, context, DIM).bfloat16()
        lengths = torch.full((batch,), context, dtype=torch.int32)
        starts = (torch.arange(batch + 1) * q_len).int()
        bias = torch.ones(q_len, context, dtype=torch.bool).tril(context - q_len)
        caches = [KVCache(pool[:, 2 * layer], pool[:, 2 * layer + 1]) for layer in range(LAYERS)]

        def ours(
            q: Tensor = q,
            caches: list[KVCache] = caches,
            tables: Tensor = tables,
            lengths: Tensor = lengths,
            starts: Tensor = starts,
            q_len: int = q_len,
        ) -> None:
            for cache in caches:
                paged_attention(
                    q,
                    cache,
                    block_tables=tables,
                    seq_lens=lengths,
                    cu_seqlens_q=starts,
                    scale=DIM**-0.5,
                )

        def theirs(q: Tensor = q, gathered: Tensor = gathered, bias: Tensor = bias, batch: int = batch) -> None:
            queries = q.unflatten(0, (batch, -1)).transpose(1, 2)
            for layer in range(LAYERS):
                F.scaled_dot_product_attention(
                    queries, gathered[2 * layer], gathered[2 * layer + 1], attn_mask=bias, enable_gqa=True
                )

        pairs = batch * (q_len * context - q_len * (q_len - 1) / 2)
        yield KernelCase(
            f"attention, batch {batch}, {q_len} of {context}",
            "SDPA, gathered",
            ours,
            theirs,
            LAYERS,
            batch * context * KV_HEADS * DIM * 4,
            4 * pairs * HEADS * DIM,
        )


def rows() -> Iterator[KernelCase]:
    """The row-wise operations, compared with their torch forms."""
    for tokens in (1, 32, 512):
        x, weight = torch.randn(tokens, 768).bfloat16(), torch.randn(768).bfloat16()
        gate_up = torch.randn(tokens, 4096).bfloat16()
        qkv = torch.randn(tokens, 20, 64).bfloat16()
        cos, sin, slots = torch.randn(tokens, 64), torch.randn(tokens, 64), torch.arange(tokens)
        cache = KVCache(*torch.zeros(2, 40, KV_HEADS, BLOCK, DIM).bfloat16())
        rotary_arguments = (qkv[:, :12], qkv[:, 12:16], qkv[:, 16:], cos, sin, cache, slots)
        cases: list[tuple[str, Callable[[], object], Callable[[], object], int]] = [
            (
                "add and RMSNorm",
                partial(RmsNorm(weight, 1e-6).add_and_norm, x, x),
                partial(rms_norm_reference, x, weight, 1e-6, x),
                tokens * 768 * 2 * 4,
            ),
            ("SiLU and multiply", partial(silu_mul, gate_up), partial(silu_mul_reference, gate_up), tokens * 12288),
            (
                "rotary and store",
                partial(rotary_and_store, *rotary_arguments),
                partial(rotary_and_store_reference, *rotary_arguments),
                tokens * 20 * 64 * 2 * 2,
            ),
        ]
        for what, ours, theirs, moved in cases:
            yield KernelCase(f"{what}, {tokens} tokens", "torch", ours, theirs, 1, moved, 0)


def sampling() -> Iterator[KernelCase]:
    """Sampling, compared with its torch form, which sorts."""
    for vocabulary, filters in ((8192, False), (8192, True), (128256, True)):
        logits = torch.randn(16, vocabulary)
        top_k = torch.full((16,), 50 if filters else 0, dtype=torch.int32)
        top_p = torch.full((16,), 0.9 if filters else 1.0)
        key = (torch.arange(16), torch.zeros(16, dtype=torch.int32), torch.arange(16))
        knobs = (torch.ones(16), top_k, top_p, torch.zeros(16), *key)
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
        named = dict(zip(names, knobs, strict=True))
        what = f"draw, 16 rows of {vocabulary}" + (", top-k and top-p" if filters else "")
        ours, theirs = partial(sample, logits, **named), partial(sample_reference, logits, *knobs)
        yield KernelCase(what, "torch", ours, theirs, 1, logits.nbytes, 0)


def measure(case: KernelCase, bandwidth: float, throughput: float, rounds: int) -> KernelTiming:
    ours = theirs = float("inf")
    case.ours(), case.theirs()
    for _ in range(rounds):
        ours = min(ours, best_seconds(case.ours, 3))
        theirs = min(theirs, best_seconds(case.theirs, 3))
    ours, theirs = ours / case.times * 1e6, theirs / case.times * 1e6
    bound = max(case.bytes_read / bandwidth, case.operations / throughput) * 1e6
    return KernelTiming(case.what, case.beside, ours, theirs, theirs / ours, bound, bound / ours)


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of three runs each, ours and theirs in turn.")] = 8,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Where to save the figures.")] = None,
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    bandwidth, throughput = read_bandwidth(), matrix_throughput()
    table = Table("what", "beside", "ours us", "theirs us", "times as fast", "bound us", "share of bound")
    found = []
    for group in (linears, attention, rows, sampling):
        for case in group():
            if only not in case.what:
                continue
            row = measure(case, bandwidth, throughput, rounds)
            found.append(row)
            table.add_row(
                row.what,
                row.beside,
                f"{row.ours_us:.1f}",
                f"{row.theirs_us:.1f}",
                f"{row.ratio:.2f}",
                f"{row.bound_us:.1f}",
                f"{row.share_of_bound:.0%}",
            )
    console = Console()
    console.print(
        f"{native_status()}, {threads} threads: {bandwidth / 1e9:.1f} GB/s, {throughput / 1e9:.0f} GFLOP/s bf16"
    )
    console.print(table)
    facts = dict(machine=describe_machine(), threads=threads, kernels=native_status(), bandwidth=bandwidth)
    write_results(out, facts | dict(throughput=throughput, rows=[asdict(row) for row in found]))


if __name__ == "__main__":
    typer.run(main)
