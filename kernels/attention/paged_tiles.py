"""Paged attention on a GPU. paged_attention.py has the formula; attention_plan.py divides a step.

`_tiles` is the kernel for all queries. The BLOCK_M rows of a tile are consecutive queries of one sequence, with PACK
heads of one KV head each. Short tiles (one query with all heads of a KV head, or a few queries) have 16 rows in most
models, so a decode reads keys and values once and wastes no matrix products. Wide tiles have up to 128 rows. A fixed
number of programs takes the items in turn, so a CUDA graph can capture the launch. An item with all keys of its tile
writes the output. Other items write (maximum, sum of exp2, weighted values) in float32 to slots, and `_merge` combines
the slots of a query.

In batch-invariant mode all tiles have one shape, every range of UNIT keys has its own running maximum and sum, and
`_fold` combines the ranges in order, in `_tiles` or in `_merge`. So a query has the same bits in a decode, in a chunk
and in a whole prefill. A query over no keys gives zeros.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.attention.attention_plan import (
    COUNTS,
    INVARIANT_UNIT,
    ITEM,
    MERGE,
    HostPlan,
    PlanSpace,
    pack_plans,
    plan_attention,
)
from coatcheck.kernels.attention.query_tile import _attend
from coatcheck.kernels.attention.tile_launch import Tiles
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS, _narrowed, _value_scale_factor

_LOG2_E = tl.constexpr(1.4426950408889634)
_MERGE_PARTS = 16  # parts that `_merge` reads at a time


@triton.jit
def _fold(peak, total, more_peak, more_total):
    """(maximum, sum of exp2, factor of the first part, factor of the second part) of two parts together. The explicit
    fma makes the bits equal in both kernels that use it."""
    top = tl.maximum(peak, more_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep, add = tl.exp2(peak - base), tl.exp2(more_peak - base)
    return top, tl.fma(total, keep, more_total * add), keep, add


@triton.jit(do_not_specialize=["counts", "items", "table_stride", "window"])
def _tiles(
    q, k, v, k_scales, v_scales, tables, counts, items, sinks, out, mid, peaks, sums,
    q_stride, k_stride, v_stride, k_scales_stride, v_scales_stride, table_stride, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, CAPPED: tl.constexpr,
    TWO_LOOPS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """UNIT: in batch-invariant mode the keys of a range with its own running maximum and sum; else 0. TWO_LOOPS: keys
    to which all queries of a tile attend are computed in a loop without a mask."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM  # stored elements of a row; an int4 element has two values
    TILES: tl.constexpr = HEADS // PACK
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_dims = dims < WIDTH
    for work in range(tl.program_id(0), tl.load(counts) * TILES, tl.num_programs(0)):
        first_head = work % TILES * PACK
        item = items + work // TILES * 8
        seq, first_token, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        first_position, first_key, end, slot = (
            tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        )  # fmt: skip
        query, heads = rows // PACK, first_head + rows % PACK
        in_rows, position = query < count, first_position + query
        tokens = (first_token + query).to(tl.int64)
        mask = in_rows[:, None] & in_dims[None]
        at_query = q + (tokens * q_stride + heads * DIM)[:, None] + dims[None]
        queries = tl.load(at_query, mask, other=0.0)
        high_queries = queries
        if KIND == 3:
            high_queries = tl.load(at_query + WIDTH, mask, other=0.0)
        slope = scale
        if KIND > 0:
            queries, high_queries, divisor = _narrowed(queries, high_queries, True)
            slope = divisor * scale
        start = first_key // BLOCK_N * BLOCK_N
        table = tables + seq.to(tl.int64) * table_stride
        kv_head = first_head // GROUP
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        high_acc = total
        if KIND == 3:
            high_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if UNIT > 0:
            for base in range(first_key // UNIT * UNIT, end, UNIT):
                more_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                more_total = tl.zeros([BLOCK_M], tl.float32)
                more = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                high_more = more_total
                if KIND == 3:
                    high_more = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                # All keys are computed with a mask, because code without the mask may be compiled to other roundings.
                more, high_more, more_peak, more_total = _attend(
                    tl.maximum(start, base), tl.minimum(base + UNIT, end), queries, high_queries, position,
                    more, high_more, more_peak, more_total, k, v, k_scales, v_scales, table, kv_head,
                    k_stride, v_stride, k_scales_stride, v_scales_stride, slope, softcap, window,
                    WIDTH, SIZE, BLOCK_N, BLOCK_D, PRECISION, KIND, CONVERT, CAPPED, True,
                )  # fmt: skip
                if not CAPPED:
                    more_peak *= slope
                peak, total, keep, add = _fold(peak, total, more_peak, more_total)
                acc = tl.fma(acc, keep[:, None] + tl.zeros_like(acc), more * add[:, None])
                if KIND == 3:
                    high_acc = tl.fma(high_acc, keep[:, None] + tl.zeros_like(acc), high_more * add[:, None])
        else:
            if TWO_LOOPS:
                whole = tl.minimum(end, (first_position + 1) // BLOCK_N * BLOCK_N)
                whole = tl.where(window > 0, start, tl.maximum(start, whole // BLOCK_N * BLOCK_N))
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
            if not CAPPED:
                peak *= slope
        lowered = 1.0 / _value_scale_factor(KIND)
        if slot >= 0:
            at = (slot + query).to(tl.int64) * HEADS + heads
            tl.store(peaks + at, peak, in_rows)
            tl.store(sums + at, total, in_rows)
            at_mid = mid + at[:, None] * DIM + dims[None]
            tl.store(at_mid, acc * lowered, mask)
            if KIND == 3:
                tl.store(at_mid + WIDTH, high_acc * lowered, mask)
        else:
            factor = tl.full([BLOCK_M], 1.0, tl.float32) * lowered
            sum_of_all = total
            if SINKS:
                sink = tl.load(sinks + heads) * _LOG2_E
                _, sum_of_all, keep_sink, _ = _fold(peak, total, sink, tl.full([BLOCK_M], 1.0, tl.float32))
                factor *= keep_sink
            sum_of_all = tl.where(sum_of_all > 0, sum_of_all, 1.0)
            at_out = out + ((tokens * HEADS + heads) * DIM)[:, None] + dims[None]
            tl.store(at_out, (acc * factor[:, None] / sum_of_all[:, None]).to(out.dtype.element_ty), mask)
            if KIND == 3:
                high = high_acc * factor[:, None] / sum_of_all[:, None]
                tl.store(at_out + WIDTH, high.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["counts", "merges"])
def _merge(
    mid, peaks, sums, counts, merges, sinks, out, lse,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of each query and head. PARTS: how many are read at a time; 1 folds them in order. `lse`: None,
    or where the log-sum-exp is written."""
    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < DIM
    for work in range(tl.program_id(0), tl.load(counts + 2) * HEADS, tl.num_programs(0)):
        row, head = merges + work // HEADS * 4, work % HEADS
        token, slot, stride, parts = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        peak, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        if PARTS == 1:
            for part in range(parts):
                at = (slot + part * stride).to(tl.int64) * HEADS + head
                more = tl.load(mid + at * DIM + dims, in_dims, other=0.0)
                peak, total, keep, add = _fold(peak, total, tl.load(peaks + at), tl.load(sums + at))
                acc = tl.fma(acc, keep + tl.zeros_like(acc), more * add)
        else:
            for first in range(0, parts, PARTS):
                part = first + tl.arange(0, PARTS)
                there = part < parts
                at = (slot + part * stride).to(tl.int64) * HEADS + head
                more = tl.load(peaks + at, there, other=float("-inf"))
                top = tl.maximum(peak, tl.max(more, 0))
                base = tl.where(top == float("-inf"), 0.0, top)
                keep, add = tl.exp2(peak - base), tl.exp2(more - base)
                total = total * keep + tl.sum(tl.load(sums + at, there, other=0.0) * add, 0)
                values = tl.load(mid + at[:, None] * DIM + dims[None], there[:, None] & in_dims[None], other=0.0)
                acc = acc * keep + tl.sum(values * add[:, None], 0)
                peak = top
        factor = tl.full([], 1.0, tl.float32)
        if SINKS:
            sink = tl.load(sinks + head) * _LOG2_E
            peak, total, factor, _ = _fold(peak, total, sink, tl.full([], 1.0, tl.float32))
        y = acc * factor / tl.where(total > 0, total, 1.0)
        tl.store(out + (token.to(tl.int64) * HEADS + head) * DIM + dims, y.to(out.dtype.element_ty), in_dims)
        if lse is not None:
            tl.store(lse + token.to(tl.int64) * HEADS + head, (peak + tl.log2(total)) / _LOG2_E)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A plan on the device. `packed`: int32, the result of `pack_plans` for this plan in `space`. `is_medium`: the wide
    items are medium tiles."""

    packed: Tensor
    space: PlanSpace
    tiles: Tiles
    is_medium: bool


def host_plan(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    tiles: Tiles,
    window: int,
    *,
    all_wide: bool = False,
    is_medium: bool | None = None,
) -> tuple[HostPlan, bool]:
    """(the plan of a step, whether its wide items are medium tiles).

    `all_wide`: sequences of few queries have wide tiles, too. `is_medium`: None chooses by the most queries of a
    sequence.
    """
    if is_medium is None:
        is_medium = max(q_lens, default=0) <= tiles.medium.shape.queries
    wide = tiles.medium if is_medium else tiles.wide
    short = tiles.short.shape._replace(queries=0) if all_wide else tiles.short.shape
    plan = plan_attention(
        q_lens, seq_lens, short=short, wide=wide.shape, window=window, batch_invariant=tiles.batch_invariant
    )
    return plan, is_medium


def make_plan(
    q_lens: Sequence[int], seq_lens: Sequence[int], tiles: Tiles, window: int, device: torch.device
) -> AttentionPlan:
    """The plan of a step on the device. The host waits for the copy."""
    plan, is_medium = host_plan(q_lens, seq_lens, tiles, window)
    space = PlanSpace.of(plan)
    return AttentionPlan(torch.tensor(pack_plans([plan], [space]), device=device), space, tiles, is_medium)


def launch_attention(
    q: Tensor, cache: KVCache, block_tables: Tensor, plan: AttentionPlan, scale: float, sliding_window: int,
    softcap: float, sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Compute the queries of `plan` into `out`. Other rows of `out` are not written."""
    heads, dim = q.shape[1:]
    tiles = plan.tiles
    counts, items, merges, slots = split_plan(plan, heads, dim, q.device)
    strides = (q.stride(0), cache.k.stride(0), cache.v.stride(0), *(cache.scales_stride(i) // 2 for i in range(2)))
    wide = tiles.medium if plan.is_medium else tiles.wide
    for index, (tile, num_items) in enumerate(((tiles.short, plan.space.short), (wide, plan.space.wide))):
        if not num_items:
            continue
        _tiles[(min(num_items * tile.shape.head_tiles, tile.shape.programs),)](
            q, cache.k_bytes, cache.v_bytes, *cache.scale_words, block_tables, counts[index:], items[index],
            slots[1] if sinks is None else sinks, out, *slots, *strides, block_tables.stride(0),
            scale if softcap > 0 else scale * _LOG2_E.value, softcap, sliding_window,
            HEADS=heads, GROUP=heads // cache.kv_heads, PACK=tile.pack, DIM=dim, SIZE=cache.block_size,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, SINKS=sinks is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", KIND=KINDS.get(cache.dtype, 0),
            CONVERT=tile.convert, CAPPED=softcap > 0 or tile.is_capped, TWO_LOOPS=tile.two_loops,
            UNIT=INVARIANT_UNIT if tiles.batch_invariant else 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    merge_parts(plan, counts, merges, slots, sinks, out)


# float32: weighted values [slots, heads, dim], running maxima [slots, heads] and sums of exp2 [slots, heads].
Slots = tuple[Tensor, Tensor, Tensor]


def split_plan(
    plan: AttentionPlan, heads: int, dim: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Slots]:
    """(counts, (short items, wide items), merges, new slots) for outputs [tokens, heads, dim]."""
    space = plan.space
    mid = torch.empty((space.slots, heads, dim), dtype=torch.float32, device=device)
    peaks, sums = (torch.empty((space.slots, heads), dtype=torch.float32, device=device) for _ in range(2))
    counts, short, wide, merges = plan.packed.split(
        (COUNTS, ITEM * space.short, ITEM * space.wide, MERGE * space.merges)
    )
    return counts, (short, wide), merges, (mid, peaks, sums)


def merge_parts(
    plan: AttentionPlan, counts: Tensor, merges: Tensor, slots: Slots, sinks: Tensor | None, out: Tensor,
    lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Combine the slots of every query whose keys were divided. Write `out` [tokens, heads, dim] and, if given, `lse`
    [tokens, heads]."""
    heads, dim = out.shape[1:]
    if plan.space.merges:
        _merge[(min(plan.space.merges * heads, 4 * plan.tiles.short.shape.programs),)](
            *slots, counts, merges, slots[1] if sinks is None else sinks, out, lse, HEADS=heads, DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim), PARTS=1 if plan.tiles.batch_invariant else _MERGE_PARTS,
            SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip
