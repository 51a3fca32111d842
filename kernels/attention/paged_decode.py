"""Paged attention on a GPU for sequences that bring one query: see paged_attention.py for the formula and shapes.

The keys of a sequence are cut into splits of SPLIT keys. The size is fixed, so a result does not depend on the batch. A
work item is one split of one KV head, with all query heads of that KV head in the rows of `tl.dot`, which needs at
least 16. A fixed number of programs of `_decode` takes the items of all sequences in turn. So a long sequence among
short ones keeps the whole GPU busy, and a CUDA graph can record the launch. Each item writes (peak, sum, weighted
values) in float32, and one program of `_reduce` combines the splits of one (sequence, head). Sequences with more than
one query, or none, have no splits, so prefills and decodes can share a batch. One query over no keys gives zeros.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.attention.online_softmax import _accumulate_tile, _scores
from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS, _lift, _narrowed, _places, _scales_of

SPLIT = 512
_PROGRAMS_PER_PROCESSOR = 16  # more than run at once, so that all processors finish at about the same time
_SEQS = 256  # sequence lengths that a program reads at a time
_LOG2_E = tl.constexpr(1.4426950408889634)


class DecodeLaunch(NamedTuple):
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_launch(group: int, width: int, element_size: int, pool_bits: int, gpu: GpuProperties) -> DecodeLaunch:
    """Launch parameters with key tiles of about 16 KiB.

    `width`: elements in a row of the cache, head_dim or (int4) half of it. `element_size`: bytes of a query's element.
    `pool_bits`: of an element in the pool. The compiler pipelines the block numbers as well as the rows, so rows are
    prefetched only from five stages on. Two programs must fit into the shared memory.
    """
    block_d: int = max(16, triton.next_power_of_2(width))
    block_m: int = max(16, triton.next_power_of_2(group))
    row = block_d * max(1, pool_bits // 8)  # bytes of a key
    block_n = max(16, min(128, 16384 // row))
    halves = 2 if pool_bits == 4 else int(pool_bits < 8 * element_size)
    widened = halves * block_d * element_size  # bytes of a key's values once widened

    def fits(tiles: int, keys: int) -> bool:
        own = 3072 + block_m * (block_d + keys) * element_size + keys * widened
        return 2 * (own + 2 * tiles * keys * row) <= gpu.shared

    if not fits(2, block_n):
        block_n = max(16, block_n // 2)
    stages = 5 if fits(2, block_n) else 3 if fits(1, block_n) else 1
    if gpu.wide_tiles:  # otherwise triton 3.7.1 spills 8 to 24 bytes on sm_90; the times on a GPU are not measured yet
        if (element_size == 4 and block_d == 128) or (pool_bits == 4 and (width < block_d or block_d > 64)):
            block_n = max(16, block_n // 2)
        if element_size == 4 and block_d > 128:
            stages = min(stages, 3)
    return DecodeLaunch(block_m, block_n, block_d, 4, min(stages, gpu.max_stages))


def pick_programs(splits: int, kv_heads: int, gpu: GpuProperties) -> int:
    """The number of programs for at most `splits` splits."""
    return max(1, min(splits * kv_heads, gpu.processors * _PROGRAMS_PER_PROCESSOR))


def max_splits(num_seqs: int, max_seq_len: int, total_seq_len: int | None = None, split: int = SPLIT) -> int:
    """The largest number of splits of `num_seqs` sequences up to `max_seq_len`, of `total_seq_len` keys together."""
    whole = num_seqs * -(-max_seq_len // split)
    return max(1, whole if total_seq_len is None else min(whole, total_seq_len // split + num_seqs))


@triton.jit
def _splits_of(seq_lens, cu_seqlens, seqs, inside, window, SPLIT_SIZE: tl.constexpr):
    """(number of splits that each sequence reads, the first one). Splits before the window are not read."""
    lens = tl.load(seq_lens + seqs, inside, other=0)
    queries = tl.load(cu_seqlens + seqs + 1, inside, other=0) - tl.load(cu_seqlens + seqs, inside, other=0)
    first = tl.where(window > 0, tl.maximum(lens - window, 0), 0) // SPLIT_SIZE
    return tl.where(queries == 1, (lens + SPLIT_SIZE - 1) // SPLIT_SIZE - first, 0), first


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "table_stride", "window", "num_seqs"])
def _decode(
    q, k, v, k_scales, v_scales, tables, seq_lens, cu_seqlens, mid, peaks, sums,
    q_stride, k_stride, v_stride, k_scales_stride, v_scales_stride, table_stride, scale, softcap, window, num_seqs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SEQS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM  # elements in a row of the cache; int4 has two in each
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_rows, in_dims = rows < GROUP, dims < WIDTH
    across, seqs = tl.arange(0, BLOCK_N), tl.arange(0, SEQS)
    items = tl.full([], 0, tl.int32)
    for base in range(0, num_seqs, SEQS):
        counts, _ = _splits_of(seq_lens, cu_seqlens, base + seqs, base + seqs < num_seqs, window, SPLIT_SIZE)
        items += tl.sum(counts, 0)
    for work in range(tl.program_id(0), items * KV_HEADS, tl.num_programs(0)):
        item, kv_head = work // KV_HEADS, work % KV_HEADS
        # The item belongs to the first sequence whose items do not all come before it.
        seq, first_item, seen_items = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for base in range(0, num_seqs, SEQS):
            inside = base + seqs < num_seqs
            counts, _ = _splits_of(seq_lens, cu_seqlens, base + seqs, inside, window, SPLIT_SIZE)
            ends = seen_items + tl.cumsum(counts, 0)
            passed = inside & (ends <= item)
            seq += tl.sum(passed.to(tl.int32), 0)
            first_item = tl.maximum(first_item, tl.max(tl.where(passed, ends, 0), 0))
            seen_items += tl.sum(counts, 0)
        seq_len = tl.load(seq_lens + seq)
        lowest = tl.where(window > 0, tl.maximum(seq_len - window, 0), 0)  # the query's position is seq_len - 1
        split = lowest // SPLIT_SIZE + item - first_item
        heads = kv_head * GROUP + rows
        at_query = q + tl.load(cu_seqlens + seq).to(tl.int64) * q_stride + heads[:, None] * DIM + dims[None]
        queries = tl.load(at_query, in_rows[:, None] & in_dims[None], other=0.0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        high_queries, high_acc = queries, total
        if KIND == 3:
            high_queries = tl.load(at_query + WIDTH, in_rows[:, None] & in_dims[None], other=0.0)
            high_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        slope = scale
        if KIND > 0:
            queries, high_queries, divisor = _narrowed(queries, high_queries, False)
            slope *= divisor
        end = tl.minimum(seq_len, (split + 1) * SPLIT_SIZE)
        start = tl.maximum(split * SPLIT_SIZE, (lowest // BLOCK_N) * BLOCK_N)
        table = tables + seq.to(tl.int64) * table_stride
        for first in range(start, end, BLOCK_N):
            keys = first + across
            held = keys < end
            nth, row = _places(first, across, SIZE, BLOCK_N)
            block = tl.load(table + nth, held, other=0).to(tl.int64)
            at = (kv_head * SIZE + row) * WIDTH
            v_scale = slope  # a placeholder, not used
            if KIND > 0:
                k_scale, v_scale = _scales_of(
                    k_scales, v_scales, table, first, end, kv_head, k_scales_stride, v_scales_stride,
                    KIND, SIZE, BLOCK_N, CONVERT,
                )  # fmt: skip
            # Keys past the end are read from block 0 and their scores masked. Their values could be NaN, so they are 0.
            at_key = k + (block * k_stride + at)[:, None] + dims[None]
            at_value = v + (block * v_stride + at)[:, None] + dims[None]
            if WIDTH == BLOCK_D:
                key, value = tl.load(at_key), tl.load(at_value, held[:, None], other=0)
            else:
                key = tl.load(at_key, in_dims[None], other=0)
                value = tl.load(at_value, held[:, None] & in_dims[None], other=0)
            score = _scores(queries, high_queries, key, PRECISION, KIND, CONVERT)
            if KIND > 0:
                score *= k_scale[None]
            if CAPPED:  # tanh(y) = 1 - 2 / (e^2y + 1)
                bend, cap = 2.0 * _LOG2_E * slope / softcap, softcap * _LOG2_E
                score = cap - 2.0 * cap / (tl.exp2(tl.minimum(score * bend, 90.0)) + 1.0)
            score = tl.where((held & (keys >= lowest))[None], score, float("-inf"))
            acc, high_acc, peak, total = _accumulate_tile(
                score, slope, slope, value, v_scale, acc, high_acc, peak, total, queries.dtype,
                PRECISION, KIND, CONVERT, CAPPED, True,
            )  # fmt: skip
        at = item * HEADS + heads.to(tl.int64)
        tl.store(peaks + at, peak if CAPPED else peak * slope, in_rows)
        tl.store(sums + at, total, in_rows)
        whole = 1.0 / _lift(KIND)
        tl.store(mid + at[:, None] * DIM + dims[None], acc * whole, in_rows[:, None] & in_dims[None])
        if KIND == 3:
            tl.store(mid + at[:, None] * DIM + WIDTH + dims[None], high_acc * whole, in_rows[:, None] & in_dims[None])


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "window"])
def _reduce(
    mid, peaks, sums, seq_lens, cu_seqlens, sinks, out, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT_SIZE: tl.constexpr, SEQS: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens + seq)
    if tl.load(cu_seqlens + seq + 1) - token != 1:
        return
    first_item = tl.full([], 0, tl.int32)
    seqs = tl.arange(0, SEQS)
    for base in range(0, seq, SEQS):
        counts, _ = _splits_of(seq_lens, cu_seqlens, base + seqs, base + seqs < seq, window, SPLIT_SIZE)
        first_item += tl.sum(counts, 0)
    splits, _ = _splits_of(seq_lens, cu_seqlens, seq, True, window, SPLIT_SIZE)
    dims = tl.arange(0, BLOCK_D)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, TILE):
        split = first + tl.arange(0, TILE)
        there = split < splits
        at = (first_item + split).to(tl.int64) * HEADS + head
        more = tl.load(peaks + at, there, other=float("-inf"))
        top = tl.maximum(peak, tl.max(more, 0))
        base_peak = tl.where(top == float("-inf"), 0.0, top)
        keep, add = tl.exp2(peak - base_peak), tl.exp2(more - base_peak)
        total = total * keep + tl.sum(tl.load(sums + at, there, other=0.0) * add, 0)
        parts = tl.load(mid + at[:, None] * DIM + dims[None], there[:, None] & (dims < DIM)[None], other=0.0)
        acc = acc * keep + tl.sum(parts * add[:, None], 0)
        peak = top
    if SINKS:
        sink = tl.load(sinks + head) * _LOG2_E
        top = tl.maximum(peak, sink)
        keep = tl.exp2(peak - top)
        total = total * keep + tl.exp2(sink - top)
        acc = acc * keep
    y = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dims, y.to(out.dtype.element_ty), dims < DIM)


def launch_decode(
    q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    scale: float, sliding_window: int, softcap: float, sinks: Tensor | None, out: Tensor,
    total_seq_len: int | None = None, *, programs: int | None = None, launch: DecodeLaunch | None = None,
    split: int = SPLIT,
) -> None:  # fmt: skip
    """Memory is allocated for the longest sequences that the block tables can hold, or for `total_seq_len` keys of all
    sequences, because the lengths are on the device. `programs`, `launch` and `split` replace the chosen values; with
    another `split` results differ in their last bits."""
    num_seqs, heads, dim = len(seq_lens), q.shape[1], q.shape[2]
    kv_heads, size = cache.kv_heads, cache.block_size
    if num_seqs == 0:
        return
    splits = max_splits(num_seqs, block_tables.shape[1] * size, total_seq_len, split)
    gpu = gpu_properties(q.device)
    launch = launch or pick_launch(heads // kv_heads, cache.k.shape[3], q.element_size(), cache.bits, gpu)
    mid = torch.empty((splits, heads, dim), dtype=torch.float32, device=q.device)
    peaks, sums = (torch.empty((splits, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    _decode[(programs or pick_programs(splits, kv_heads, gpu),)](
        q, cache.k_bytes, cache.v_bytes, *cache.scale_words,
        block_tables, seq_lens, cu_seqlens_q, mid, peaks, sums,
        q.stride(0), cache.k.stride(0), cache.v.stride(0), cache.scales_stride(0) // 2, cache.scales_stride(1) // 2,
        block_tables.stride(0), scale if softcap > 0 else scale * _LOG2_E.value, softcap, sliding_window, num_seqs,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, SIZE=size, SPLIT_SIZE=split, SEQS=_SEQS,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=launch.block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        KIND=KINDS.get(cache.dtype, 0), CONVERT=gpu.convert, CAPPED=softcap > 0,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    _reduce[(num_seqs, heads)](
        mid, peaks, sums, seq_lens, cu_seqlens_q, peaks if sinks is None else sinks, out, sliding_window,
        HEADS=heads, DIM=dim, SPLIT_SIZE=split, SEQS=_SEQS, BLOCK_D=triton.next_power_of_2(dim), TILE=16,
        SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
