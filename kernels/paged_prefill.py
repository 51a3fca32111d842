"""Paged attention on a GPU for sequences that bring several queries: see paged_attention.py for formula and shapes.

One program computes BLOCK_M consecutive queries of one sequence for one head, over the cached prefix and the chunk
itself, through the block table; sequences are ragged by cu_seqlens_q. Sequences with a single query are skipped: the
decode kernel has them. The file does not know which tokens are prompt and which are not.
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
from .quantise import KINDS, _scales_of, _widened

_ANY_LENGTH = 1 << 30
# A chunk of each length takes a launch of its own; every other length takes one of theirs.
CHUNK_LENGTHS = (2, 17, 33, 65)
_LOG2_E = tl.constexpr(1.4426950408889634)


class PrefillLaunch(NamedTuple):
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def pick_launch(
    max_seqlen_q: int, head_dim: int, width: int, element_size: int, quantised: bool, arch: Arch
) -> PrefillLaunch:
    """Short chunks take short tiles; wide heads, float32 and what has to be widened take fewer keys at once, for shared
    memory and registers. `width`: of a row of the cache, head_dim or (int4) half of it; `element_size`: the queries'.
    Five stages, where shared memory has them, keep a tile of rows on its way (see paged_decode.py)."""
    block_d = max(16, triton.next_power_of_2(width))
    wide_head = triton.next_power_of_2(head_dim) > 128
    if element_size == 4:
        block_m, block_n, num_warps = 64, 16 if wide_head else 32, 8
    elif wide_head:
        block_m, block_n, num_warps = 64, 32, 8 if quantised else 4
    elif quantised and not arch.wide_tiles:
        block_m, block_n, num_warps = 64, 32, 4
    else:
        block_m, block_n, num_warps = 128, 64, 8
    # On its way, in use, and one more that a matrix product may still be reading.
    room = ((block_m + 2 * tiles * block_n) * block_d * element_size <= arch.shared for tiles in (3, 2))
    stages = min(5 if next(room) else 3 if next(room) else 1, arch.most_stages)
    if block_m > max_seqlen_q:
        block_m = max(16, triton.next_power_of_2(max_seqlen_q))
        num_warps = num_warps if block_m > 64 else min(num_warps, 4)
    return PrefillLaunch(block_m, block_n, block_d, num_warps, stages)


@triton.jit
def _attend(
    start, end, queries, high_queries, position, acc, high_acc, peak, total,
    k, v, k_scales, v_scales, table, kv_head,
    k_stride, v_stride, k_scales_stride, v_scales_stride, scale, softcap, window,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `start` to `end`. Not MASKED: every query sees all of them, and they fill their tiles.

    Scores are in powers of two, which is what the processor raises: without a softcap `scale` has log2(e) in it."""
    dims = tl.arange(0, BLOCK_D)
    if KIND > 0:
        # Too narrow for the compiler to stage: scales are asked for one tile ahead, their blocks two.
        ahead = start + tl.arange(0, BLOCK_N)
        soon = tl.load(table + ahead // SIZE, ahead < end, other=0).to(tl.int64)
        row = kv_head * SIZE + ahead % SIZE
        k_scale, v_scale = _scales_of(
            k_scales, v_scales, soon, row, ahead < end, k_scales_stride, v_scales_stride, KIND
        )  # fmt: skip
        soon = tl.load(table + (ahead + BLOCK_N) // SIZE, ahead + BLOCK_N < end, other=0).to(tl.int64)
    for first in range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        held = keys < end
        if MASKED:
            block = tl.load(table + keys // SIZE, held, other=0).to(tl.int64)
            inside = held[:, None] & (dims < WIDTH)[None]
        else:
            block = tl.load(table + keys // SIZE).to(tl.int64)
            inside = (dims < WIDTH)[None]
        row = kv_head * SIZE + keys % SIZE
        if KIND > 0:
            ahead = keys + BLOCK_N
            next_k_scale, next_v_scale = _scales_of(
                k_scales, v_scales, soon, kv_head * SIZE + ahead % SIZE, ahead < end,
                k_scales_stride, v_scales_stride, KIND,
            )  # fmt: skip
            soon = tl.load(table + (ahead + BLOCK_N) // SIZE, ahead + BLOCK_N < end, other=0).to(tl.int64)
        key = tl.load(k + (block * k_stride + row * WIDTH)[:, None] + dims[None], inside, other=0)
        value = tl.load(v + (block * v_stride + row * WIDTH)[:, None] + dims[None], inside, other=0)
        if KIND == 3:
            low, high = _widened(key & 15, KIND, NATIVE, queries.dtype), _widened(key >> 4, KIND, NATIVE, queries.dtype)
            score = tl.dot(queries, tl.trans(low), input_precision=PRECISION)
            score = tl.dot(high_queries, tl.trans(high), score, input_precision=PRECISION)
        else:
            key = _widened(key, KIND, NATIVE, queries.dtype)
            score = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
        score = score * scale
        if KIND > 0:
            score *= k_scale[None]
        if softcap > 0:
            e = tl.exp(2.0 * tl.minimum(score / softcap, 30.0))
            score = softcap * _LOG2_E * (e - 1.0) / (e + 1.0)
        if MASKED:
            seen = (keys[None] <= position[:, None]) & ((window <= 0) | (keys[None] > position[:, None] - window))
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        weight = tl.exp2(score - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weight, 1)
        if KIND > 0:
            weight *= v_scale[None]
            k_scale, v_scale = next_k_scale, next_v_scale
        weight = weight.to(queries.dtype)
        if KIND == 3:
            high = _widened(value >> 4, KIND, NATIVE, queries.dtype)
            high_acc = high_acc * decay[:, None] + tl.dot(weight, high, input_precision=PRECISION)
            value = value & 15
        value = _widened(value, KIND, NATIVE, queries.dtype)
        acc = acc * decay[:, None] + tl.dot(weight, value, input_precision=PRECISION)
        peak = top
    return acc, high_acc, peak, total


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "table_stride", "window"])
def _prefill(
    q, k, v, k_scales, v_scales, tables, seq_lens, cu_seqlens, sinks, out,
    q_stride, k_stride, v_stride, k_scales_stride, v_scales_stride, table_stride, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM  # of a row of the cache; int4 has two halves in one
    # The last tiles see the most keys: they start first.
    tile, head, seq = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(cu_seqlens + seq)
    q_len = tl.load(cu_seqlens + seq + 1) - first_token
    if ((q_len <= 1) & (not SINGLE)) | (tile * BLOCK_M >= q_len):
        return
    shift = tl.load(seq_lens + seq) - q_len
    rows, dims = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_rows, in_dims = rows < q_len, dims < WIDTH
    position = shift + rows
    tokens = (first_token + rows).to(tl.int64)
    mask = in_rows[:, None] & in_dims[None]
    at_query = q + tokens[:, None] * q_stride + head * DIM + dims[None]
    queries = tl.load(at_query, mask, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    high_queries, high_acc = queries, total
    if KIND == 3:
        high_queries = tl.load(at_query + WIDTH, mask, other=0.0)
        high_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = shift + tl.minimum((tile + 1) * BLOCK_M, q_len)
    lowest = tl.where(window > 0, tl.maximum(shift + tile * BLOCK_M - window + 1, 0), 0)
    start = lowest // BLOCK_N * BLOCK_N
    table = tables + seq.to(tl.int64) * table_stride
    # Where one order is promised all tiles are masked: what masks nothing may still be compiled to other roundings.
    if not SINGLE:
        whole = tl.where(window > 0, start, (shift + tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N)
        acc, high_acc, peak, total = _attend(
            start, whole, queries, high_queries, position, acc, high_acc, peak, total,
            k, v, k_scales, v_scales, table, head // GROUP,
            k_stride, v_stride, k_scales_stride, v_scales_stride, scale, softcap, window,
            WIDTH, SIZE, BLOCK_N, BLOCK_D, PRECISION, KIND, NATIVE, False,
        )  # fmt: skip
        start = whole
    acc, high_acc, peak, total = _attend(
        start, end, queries, high_queries, position, acc, high_acc, peak, total,
        k, v, k_scales, v_scales, table, head // GROUP,
        k_stride, v_stride, k_scales_stride, v_scales_stride, scale, softcap, window,
        WIDTH, SIZE, BLOCK_N, BLOCK_D, PRECISION, KIND, NATIVE, True,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head) * _LOG2_E
        top = tl.maximum(peak, sink)
        keep = tl.exp2(peak - top)
        total = total * keep + tl.exp2(sink - top)
        acc = acc * keep[:, None]
        if KIND == 3:
            high_acc = high_acc * keep[:, None]
    total = tl.where(total > 0, total, 1.0)[:, None]
    at_out = out + (tokens[:, None] * HEADS + head) * DIM + dims[None]
    tl.store(at_out, (acc / total).to(out.dtype.element_ty), mask)
    if KIND == 3:
        tl.store(at_out + WIDTH, (high_acc / total).to(out.dtype.element_ty), mask)


def launch_prefill(
    q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, scale: float, sliding_window: int, softcap: float, sinks: Tensor | None, out: Tensor,
    one_order: bool = False,
) -> None:  # fmt: skip
    """`one_order`: sequences with one query too, and tiles whose size does not depend on `max_seqlen_q`."""
    heads, dim = q.shape[1], q.shape[2]
    if len(seq_lens) == 0 or q.shape[0] == 0:
        return
    arch = arch_of(q.device)
    launch = pick_launch(
        _ANY_LENGTH if one_order else max_seqlen_q, dim, cache.k.shape[3], q.element_size(), cache.is_quantised, arch
    )
    _prefill[(-(-max_seqlen_q // launch.block_m), heads, len(seq_lens))](
        q, cache.k_bytes, cache.v_bytes, cache.k_scales, cache.v_scales,
        block_tables, seq_lens, cu_seqlens_q, seq_lens if sinks is None else sinks, out,
        q.stride(0), cache.k.stride(0), cache.v.stride(0), cache.scales_stride(0), cache.scales_stride(1),
        block_tables.stride(0), scale if softcap > 0 else scale * _LOG2_E.value, softcap, sliding_window,
        HEADS=heads, GROUP=heads // cache.kv_heads, DIM=dim, SIZE=cache.block_size,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_D=launch.block_d,
        SINKS=sinks is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        KIND=KINDS.get(cache.dtype, 0), NATIVE=arch.converts_fp8, SINGLE=one_order,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
