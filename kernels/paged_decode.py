"""Paged attention on a GPU for sequences that bring one query: see paged_attention.py for the formula and shapes.

The keys of a sequence are cut into splits of SPLIT, a fixed size, so that a result never depends on the batch. One
program of `_decode` sums one (sequence, KV head, split) for all query heads of that KV head at once: they are packed
into the rows of `tl.dot`, which wants at least 16. It leaves (peak, sum, weighted values) in float32. One program of
`_reduce` combines the splits of one (sequence, head); splits in which everything is masked count for nothing. Sequences
with other than one query are skipped, so that prefills and decodes can share a batch.
"""

# Device functions are a language of their own inside Python: their arguments are pointers and constants, not objects.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .arch import Arch, arch_of
from .kv_cache import KVCache
from .quantise import KINDS, _widened

SPLIT = 512


class DecodeLaunch(NamedTuple):
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_launch(group: int, width: int, element_size: int, arch: Arch) -> DecodeLaunch:
    """Tiles of keys of about 16 KiB, so that two or three stages of K and V fit into shared memory. `width`: of a row
    of the cache, head_dim or (int4) half of it; `element_size`: the queries'."""
    block_d = max(16, triton.next_power_of_2(width))
    block_m = max(16, triton.next_power_of_2(group))
    block_n = max(16, min(64, 16384 // (block_d * element_size)))
    stages = 2 if (block_m + 4 * block_n) * block_d * element_size <= arch.shared else 1
    return DecodeLaunch(block_m, block_n, block_d, 4, stages)


@triton.jit
def _decode(
    q, k, v, k_scales, v_scales, tables, seq_lens, cu_seqlens, mid, peaks, sums,
    q_stride, k_stride, v_stride, k_scales_stride, v_scales_stride, table_stride, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SPLITS, SPLIT_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM  # of a row of the cache; int4 has two halves in one
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_seqlens + seq)
    if tl.load(cu_seqlens + seq + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    if split * SPLIT_SIZE >= seq_len:
        return
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    in_rows, in_dims = rows < GROUP, dims < WIDTH
    at_query = q + token.to(tl.int64) * q_stride + heads[:, None] * DIM + dims[None]
    queries = tl.load(at_query, in_rows[:, None] & in_dims[None], other=0.0)
    if KIND == 3:
        high_queries = tl.load(at_query + WIDTH, in_rows[:, None] & in_dims[None], other=0.0)
        high_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(seq_len, (split + 1) * SPLIT_SIZE)
    lowest = tl.where(window > 0, seq_len - window, 0)  # the query's position is seq_len - 1
    start = tl.maximum(split * SPLIT_SIZE, (lowest // BLOCK_N) * BLOCK_N)
    for first in range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        seen = keys < end
        block = tl.load(tables + seq.to(tl.int64) * table_stride + keys // SIZE, seen, other=0).to(tl.int64)
        row = kv_head * SIZE + keys % SIZE
        mask = seen[:, None] & in_dims[None]
        key = tl.load(k + (block * k_stride + row * WIDTH)[:, None] + dims[None], mask, other=0)
        value = tl.load(v + (block * v_stride + row * WIDTH)[:, None] + dims[None], mask, other=0)
        if KIND == 3:
            low, high = _widened(key & 15, KIND, NATIVE, queries.dtype), _widened(key >> 4, KIND, NATIVE, queries.dtype)
            score = tl.dot(queries, tl.trans(low), input_precision=PRECISION)
            score = tl.dot(high_queries, tl.trans(high), score, input_precision=PRECISION) * scale
        else:
            key = _widened(key, KIND, NATIVE, queries.dtype)
            score = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
        if KIND > 0:
            score *= tl.load(k_scales + block * k_scales_stride + row, seen, other=0.0).to(tl.float32)[None]
        if softcap > 0:
            e = tl.exp(2.0 * tl.minimum(score / softcap, 30.0))
            score = softcap * (e - 1.0) / (e + 1.0)
        score = tl.where((seen & (keys >= lowest))[None], score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(score - base[:, None])
        decay = tl.exp(peak - base)
        total = total * decay + tl.sum(weight, 1)
        if KIND > 0:
            weight *= tl.load(v_scales + block * v_scales_stride + row, seen, other=0.0).to(tl.float32)[None]
        weight = weight.to(queries.dtype)
        if KIND == 3:
            high = _widened(value >> 4, KIND, NATIVE, queries.dtype)
            high_acc = high_acc * decay[:, None] + tl.dot(weight, high, input_precision=PRECISION)
            value = value & 15
        value = _widened(value, KIND, NATIVE, queries.dtype)
        acc = acc * decay[:, None] + tl.dot(weight, value, input_precision=PRECISION)
        peak = top
    at = (seq.to(tl.int64) * HEADS + heads) * SPLITS + split
    tl.store(peaks + at, peak, in_rows)
    tl.store(sums + at, total, in_rows)
    tl.store(mid + at[:, None] * DIM + dims[None], acc, in_rows[:, None] & in_dims[None])
    if KIND == 3:
        tl.store(mid + at[:, None] * DIM + WIDTH + dims[None], high_acc, in_rows[:, None] & in_dims[None])


@triton.jit
def _reduce(
    mid, peaks, sums, seq_lens, cu_seqlens, sinks, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS, SPLIT_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens + seq)
    if tl.load(cu_seqlens + seq + 1) - token != 1:
        return
    dims = tl.arange(0, BLOCK_D)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    row = (seq.to(tl.int64) * HEADS + head) * SPLITS
    for split in range(tl.cdiv(tl.load(seq_lens + seq), SPLIT_SIZE)):
        more = tl.load(peaks + row + split)
        top = tl.maximum(peak, more)
        base = tl.where(top == float("-inf"), 0.0, top)
        keep, add = tl.exp(peak - base), tl.exp(more - base)
        total = total * keep + tl.load(sums + row + split) * add
        acc = acc * keep + tl.load(mid + (row + split) * DIM + dims, dims < DIM, other=0.0) * add
        peak = top
    if SINKS:
        sink = tl.load(sinks + head)
        top = tl.maximum(peak, sink)
        keep = tl.exp(peak - top)
        total = total * keep + tl.exp(sink - top)
        acc = acc * keep
    y = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dims, y.to(out.dtype.element_ty), dims < DIM)


def launch_decode(
    q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    scale: float, sliding_window: int, softcap: float, sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """The grid covers the longest sequence that the block tables could hold: no length has to come to the host."""
    num_seqs, heads, dim = len(seq_lens), q.shape[1], q.shape[2]
    kv_heads, size = cache.kv_heads, cache.block_size
    if num_seqs == 0:
        return
    splits = max(1, -(-block_tables.shape[1] * size // SPLIT))
    arch = arch_of(q.device)
    launch = pick_launch(heads // kv_heads, cache.k.shape[3], q.element_size(), arch)
    mid = torch.empty((num_seqs, heads, splits, dim), dtype=torch.float32, device=q.device)
    peaks, sums = torch.empty((2, num_seqs, heads, splits), dtype=torch.float32, device=q.device)
    _decode[(num_seqs, kv_heads, splits)](
        q, cache.k_bytes, cache.v_bytes, cache.k_scales, cache.v_scales,
        block_tables, seq_lens, cu_seqlens_q, mid, peaks, sums,
        q.stride(0), cache.k.stride(0), cache.v.stride(0), cache.scales_stride(0), cache.scales_stride(1),
        block_tables.stride(0), scale, softcap, sliding_window,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, SIZE=size, SPLITS=splits, SPLIT_SIZE=SPLIT,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=launch.block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        KIND=KINDS.get(cache.dtype, 0), NATIVE=arch.converts_fp8,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    _reduce[(num_seqs, heads)](
        mid, peaks, sums, seq_lens, cu_seqlens_q, peaks if sinks is None else sinks, out,
        HEADS=heads, DIM=dim, SPLITS=splits, SPLIT_SIZE=SPLIT, BLOCK_D=triton.next_power_of_2(dim),
        SINKS=sinks is not None,
        num_warps=1,
    )  # fmt: skip
