"""Paged attention on a GPU for sequences that bring several queries: see paged_attention.py for formula and shapes.

One program computes a tile: BLOCK_M rows, which are consecutive queries of one sequence for PACK heads of one KV head
each, over the cached prefix and the chunk itself, through the block table; sequences are ragged by cu_seqlens_q. The
grid numbers the tiles of all sequences consecutively, so decodes in the batch cost no programs. Sequences with a single
query are skipped, because the decode kernel computes them.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.attention.prefill_tile import _attend
from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS, _lift, _narrowed

_ANY_LENGTH = 1 << 30
_SEQS = 256  # sequence lengths that a program reads at a time
_LOG2_E = tl.constexpr(1.4426950408889634)


class PrefillLaunch(NamedTuple):
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_launch(
    rows: int, head_dim: int, width: int, element_size: int, quantised: bool, gpu: GpuProperties
) -> PrefillLaunch:
    """Launch parameters: short tiles for short chunks, and fewer keys in a tile for wide heads, float32 and quantised
    pools, for shared memory and registers.

    `rows`: queries of the longest chunk times heads in a tile. `width`: elements in a row of the cache, head_dim or
    (int4) half of it. `element_size`: bytes of a query's element. Rows are prefetched from five stages on (see
    paged_decode.py).
    """
    block_d = max(16, triton.next_power_of_2(width))
    wide_head = triton.next_power_of_2(head_dim) > 128
    if element_size == 4:
        block_m, block_n, num_warps = 32 if wide_head else 64, 32, 8
    elif wide_head:
        block_m, block_n, num_warps = 128 if gpu.wide_tiles and not quantised else 64, 32, 8
    elif quantised and not gpu.wide_tiles:
        block_m, block_n, num_warps = 64, 32, 4
    else:
        block_m, block_n, num_warps = 128, 64, 8
    # Tiles being fetched, in use, and still read by a matrix product.
    fits = {tiles: (block_m + 2 * tiles * block_n) * block_d * element_size <= gpu.shared for tiles in (2, 3)}
    stages = min(5 if fits[3] else 3 if fits[2] else 1, gpu.max_stages)
    if block_m > rows:
        block_m = max(16, triton.next_power_of_2(rows))
        num_warps = num_warps if block_m > 64 else min(num_warps, 4)
    return PrefillLaunch(block_m, block_n, block_d, num_warps, stages)


def has_cap_branch(softcap: bool, head_dim: int, element_size: int, quantised: bool, gpu: GpuProperties) -> bool:
    """Whether the kernel is compiled with the softcap's branch: also without a softcap for float32, and for wide heads
    over quantised pools. There the branch keeps the compiler from loading more operands than there are registers (on
    sm_90, heads of 256 over fp8 spilled 168 bytes without it)."""
    return softcap or element_size == 4 or (quantised and head_dim > 128 and gpu.wide_tiles)


def pick_pack(group: int) -> int:
    """The number of heads of a KV head in one tile: the largest divisor of `group` that fits the smallest tile."""
    return max(pack for pack in range(1, 17) if group % pack == 0)


def chunk_lengths(group: int) -> tuple[int, ...]:
    """Chunk lengths that together use every launch that any length uses, for warm-up."""
    pack = pick_pack(group)
    return tuple(sorted({max(2, rows // pack + 1) for rows in (0, 16, 32, 64)}))


def max_tiles(tokens: int, prefills: int, queries: int) -> int:
    """The largest number of tiles of `queries` queries that `prefills` sequences of `tokens` tokens together have."""
    return tokens // queries + prefills


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "table_stride", "window", "num_seqs"])
def _prefill(
    q, k, v, k_scales, v_scales, tables, seq_lens, cu_seqlens, sinks, out,
    q_stride, k_stride, v_stride, k_scales_stride, v_scales_stride, table_stride, scale, softcap, window, num_seqs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SEQS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM  # elements in a row of the cache; int4 has two in each
    QUERIES: tl.constexpr = BLOCK_M // PACK  # in a tile
    index, first_head = tl.program_id(0), tl.program_id(1) * PACK
    # The tile belongs to the first sequence whose tiles do not all come before it.
    seq, first_tile, seen_tiles = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    seqs = tl.arange(0, SEQS)
    for base in range(0, num_seqs, SEQS):
        inside = base + seqs < num_seqs
        starts = cu_seqlens + base + seqs
        lens = tl.load(starts + 1, inside, other=0) - tl.load(starts, inside, other=0)
        counts = (lens + QUERIES - 1) // QUERIES
        if not SINGLE:
            counts = tl.where(lens > 1, counts, 0)
        ends = seen_tiles + tl.cumsum(counts, 0)
        passed = inside & (ends <= index)
        seq += tl.sum(passed.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(passed, ends, 0), 0))
        seen_tiles += tl.sum(counts, 0)
    if index >= seen_tiles:
        return
    first_token = tl.load(cu_seqlens + seq)
    q_len = tl.load(cu_seqlens + seq + 1) - first_token
    # The last tiles see the most keys, so they start first.
    first_query = ((q_len + QUERIES - 1) // QUERIES - 1 - (index - first_tile)) * QUERIES
    shift = tl.load(seq_lens + seq) - q_len
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, heads = first_query + rows // PACK, first_head + rows % PACK
    in_rows, in_dims = (query < q_len) & (rows < QUERIES * PACK), dims < WIDTH
    position = shift + query
    tokens = (first_token + query).to(tl.int64)
    mask = in_rows[:, None] & in_dims[None]
    at_query = q + (tokens * q_stride + heads * DIM)[:, None] + dims[None]
    queries = tl.load(at_query, mask, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    high_queries, high_acc = queries, total
    if KIND == 3:
        high_queries = tl.load(at_query + WIDTH, mask, other=0.0)
        high_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slope = scale
    if KIND > 0:
        queries, high_queries, divisor = _narrowed(queries, high_queries, True)
        slope = divisor * scale
    end = shift + tl.minimum(first_query + QUERIES, q_len)
    lowest = tl.where(window > 0, tl.maximum(shift + first_query - window + 1, 0), 0)
    start = lowest // BLOCK_N * BLOCK_N
    table = tables + seq.to(tl.int64) * table_stride
    kv_head = first_head // GROUP
    # Batch-invariant mode masks all tiles, because code without the mask may be compiled to other roundings.
    if not SINGLE:
        whole = tl.where(window > 0, start, (shift + first_query + 1) // BLOCK_N * BLOCK_N)
        acc, high_acc, peak, total = _attend(
            start, whole, queries, high_queries, position, acc, high_acc, peak, total,
            k, v, k_scales, v_scales, table, kv_head,
            k_stride, v_stride, k_scales_stride, v_scales_stride, slope, softcap, window,
            WIDTH, SIZE, BLOCK_N, BLOCK_D, PRECISION, KIND, CONVERT, CAPPED, False,
        )  # fmt: skip
        start = whole
    acc, high_acc, peak, total = _attend(
        start, end, queries, high_queries, position, acc, high_acc, peak, total,
        k, v, k_scales, v_scales, table, kv_head,
        k_stride, v_stride, k_scales_stride, v_scales_stride, slope, softcap, window,
        WIDTH, SIZE, BLOCK_N, BLOCK_D, PRECISION, KIND, CONVERT, CAPPED, True,
    )  # fmt: skip
    if SINKS:
        if not CAPPED:
            peak *= slope
        sink = tl.load(sinks + heads) * _LOG2_E
        top = tl.maximum(peak, sink)
        keep = tl.exp2(peak - top)
        total = total * keep + tl.exp2(sink - top)
        acc = acc * keep[:, None]
        if KIND == 3:
            high_acc = high_acc * keep[:, None]
    total = (tl.where(total > 0, total, 1.0) * _lift(KIND))[:, None]
    at_out = out + ((tokens * HEADS + heads) * DIM)[:, None] + dims[None]
    tl.store(at_out, (acc / total).to(out.dtype.element_ty), mask)
    if KIND == 3:
        tl.store(at_out + WIDTH, (high_acc / total).to(out.dtype.element_ty), mask)


def launch_prefill(
    q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, scale: float, sliding_window: int, softcap: float, sinks: Tensor | None, out: Tensor,
    batch_invariant: bool = False, num_prefills: int | None = None, *, launch: PrefillLaunch | None = None,
) -> None:  # fmt: skip
    """`batch_invariant`: also computes sequences with one query, in tiles whose size does not depend on `max_seqlen_q`.
    `num_prefills`: the number of sequences with several queries, if all others have one; None: unknown. `launch`
    replaces the chosen launch parameters."""
    tokens, heads, dim = q.shape
    num_seqs, group = len(seq_lens), heads // cache.kv_heads
    if num_seqs == 0 or tokens == 0:
        return
    gpu = gpu_properties(q.device)
    pack = pick_pack(group)
    longest = _ANY_LENGTH if batch_invariant else max_seqlen_q * pack
    launch = launch or pick_launch(longest, dim, cache.k.shape[3], q.element_size(), cache.is_quantised, gpu)
    if batch_invariant or num_prefills is None:
        tiles = max_tiles(tokens, num_seqs, launch.block_m // pack)
    else:
        tiles = max_tiles(tokens - num_seqs + num_prefills, num_prefills, launch.block_m // pack)
    _prefill[(tiles, heads // pack)](
        q, cache.k_bytes, cache.v_bytes, *cache.scale_words,
        block_tables, seq_lens, cu_seqlens_q, seq_lens if sinks is None else sinks, out,
        q.stride(0), cache.k.stride(0), cache.v.stride(0), cache.scales_stride(0) // 2, cache.scales_stride(1) // 2,
        block_tables.stride(0), scale if softcap > 0 else scale * _LOG2_E.value, softcap, sliding_window, num_seqs,
        HEADS=heads, GROUP=group, PACK=pack, DIM=dim, SIZE=cache.block_size, SEQS=_SEQS,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=launch.block_d,
        SINKS=sinks is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        KIND=KINDS.get(cache.dtype, 0), CONVERT=gpu.prefill_convert, SINGLE=batch_invariant,
        CAPPED=has_cap_branch(softcap > 0, dim, q.element_size(), cache.is_quantised, gpu),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
