"""Absorbed latent attention on a GPU. latent_attention.py has the formula; attention_plan.py divides a step.

All heads read the same latents. So the BLOCK_M rows of a tile are up to 64 heads of one query, or of several queries if
the model has fewer heads. A tile of latents is read once, as keys and as values. Quantised latents are converted to the
dtype of the queries without their scales, which multiply scores and weights instead. Items, slots and merges are those
of paged_tiles.py, and its `_merge` combines the slots. A program computes one tile; programs beyond the last tile
return at once. In batch-invariant mode every range of UNIT keys has its own running maximum and sum, and the ranges are
combined in order.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.attention.attention_plan import INVARIANT_UNIT, TileShape
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, _fold, merge_parts, split_plan
from coatcheck.kernels.attention.tile_launch import TileLaunch, Tiles
from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.kv.quantise import KINDS, _locate_keys, _nibbles, _value_scale_factor, _widened

_LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 2  # of a plan for each processor; one with tiles of 64 rows, which take most of its shared memory
# Rotary keys of quantised pools are padded to this size. On an H100 products of bfloat16 queries with converted rotary
# keys of 12 elements, padded to 16, were wrong; those with 64 elements are right.
_LEAST_DEPTH = 64
_LEAST_SHARED = 80 << 10  # bytes of shared memory for tiles of 32 queries and keys


def pick_latent_tiles(
    heads: int, rank: int, *, element_size: int, pool_bits: int, gpu: GpuProperties, batch_invariant: bool = False
) -> Tiles:
    """The tiles of a model with latent attention. `heads`: that this rank computes. `rank`: elements of a latent.
    `element_size`: bytes of a query's element. `pool_bits`: bits of an element in the pool.

    On sm_90 tiles have 64 rows, because its matrix units multiply 64 rows at a time, and a latent is read and converted
    once for all of them; decodes of fewer heads have lower tiles. Other GPUs have tiles of 32 rows, because more rows
    of 512 sums spill registers. All have tiles of 16 rows with float32, an int4 pool or little shared memory, and in
    batch-invariant mode, which holds two results at once.
    """
    block_d: int = max(16, triton.next_power_of_2(rank))
    is_small = element_size == 4 or gpu.shared < _LEAST_SHARED
    is_high = gpu.warp_groups and not (is_small or batch_invariant or pool_bits == 4)
    most = 64 if is_high else 16 if is_small or batch_invariant or pool_bits == 4 else 32
    num_warps = 4 if gpu.convert == 0 else 8  # AMD's warps have 64 threads
    row = (block_d + 64) * element_size

    def tile(block_m: int) -> TileLaunch:
        block_n = 64 if is_high else 16 if is_small or (pool_bits == 8 and most == 32) else 32
        # The block numbers and the rows that they address are pipelined, so rows are prefetched only from 5 stages on.
        left = gpu.shared - 4096 - block_m * row
        stages = 5 if left >= 2 * block_n * row and not is_small else 2 if element_size == 2 else 1
        if block_m == 64:
            # Matrix units read plain rows from the shared memory into which they were loaded, so 3 stages prefetch.
            # Quantised rows are faster without prefetching, because it takes registers that the sums need.
            block_n, stages = (64, 3) if pool_bits == 16 else (32, 1)
        pack = max(pack for pack in range(1, block_m + 1) if heads % pack == 0)
        shape = TileShape(block_m // pack, heads // pack, gpu.processors * (1 if is_high else _PROGRAMS))
        stages = min(stages, gpu.max_stages)
        return TileLaunch(block_m, block_n, block_d, num_warps, stages, pack, False, gpu.convert, False, shape)

    wide = tile(most)
    short = wide if batch_invariant else tile(min(most, max(16, triton.next_power_of_2(heads))))
    return Tiles(short, wide, wide, batch_invariant)


def launch_latent_attention(
    q: Tensor, cache: LatentCache, block_tables: Tensor, plan: AttentionPlan, scale: float, out: Tensor,
    lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the queries of `plan` into `out` and `lse` (see latent_attention). Other rows are not written."""
    heads, tiles = q.shape[1], plan.tiles
    counts, items, merges, slots = split_plan(plan, heads, cache.rank, q.device)
    strides = (
        q.stride(0), cache.latent.stride(0), cache.rope_keys.stride(0), *cache.scales_strides, block_tables.stride(0)
    )  # fmt: skip
    wide = tiles.medium if plan.is_medium else tiles.wide
    for index, (tile, num_items) in enumerate(((tiles.short, plan.space.short), (wide, plan.space.wide))):
        if not num_items:
            continue
        _latent_tiles[(num_items * tile.shape.head_tiles,)](
            q, cache.latent_bytes, cache.rope_bytes, cache.latent_scales, cache.rope_scales, block_tables,
            counts[index:], items[index], out, lse, *slots, *strides, scale * _LOG2_E.value,
            HEADS=heads, PACK=tile.pack, RANK=cache.rank, ROPE=cache.rope_dim, SIZE=cache.block_size,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d,
            BLOCK_R=max(_LEAST_DEPTH if cache.is_quantised else 16, triton.next_power_of_2(cache.rope_dim)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", KIND=KINDS.get(cache.dtype, 0),
            CONVERT=tile.convert, UNIT=INVARIANT_UNIT if tiles.batch_invariant else 0,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    merge_parts(plan, counts, merges, slots, None, out, lse)


@triton.jit(do_not_specialize=["counts", "items", "table_stride"])
def _latent_tiles(
    q, latents, rope_keys, latent_scales, rope_scales, tables, counts, items, out, lse, mid, peaks, sums,
    q_stride, latent_stride, rope_stride, latent_scales_stride, rope_scales_stride, table_stride, scale,
    HEADS: tl.constexpr, PACK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """UNIT: in batch-invariant mode the keys of a range with its own running maximum and sum; else 0. `scale` includes
    log2(e), because the GPU computes exp2."""
    TILES: tl.constexpr = HEADS // PACK
    work = tl.program_id(0)
    if work >= tl.load(counts) * TILES:
        return
    item = items + work // TILES * 8
    seq, first_token, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_position, first_key, end, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    rows = tl.arange(0, BLOCK_M)
    dims, in_dims = _dims(RANK, BLOCK_D, KIND)
    rope_dims, in_rope = _dims(ROPE, BLOCK_R, KIND)
    query, heads = rows // PACK, work % TILES * PACK + rows % PACK
    in_rows, position = query < count, first_position + query
    tokens = (first_token + query).to(tl.int64)
    at_query = q + (tokens * q_stride + heads * (RANK + ROPE))[:, None]
    queries = tl.load(at_query + dims[None], in_rows[:, None] & in_dims[None], other=0.0)
    rope_queries = tl.load(at_query + RANK + rope_dims[None], in_rows[:, None] & in_rope[None], other=0.0)
    table = tables + seq.to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = first_key // BLOCK_N * BLOCK_N
    if UNIT > 0:
        for base in range(first_key // UNIT * UNIT, end, UNIT):
            more_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            more_total = tl.zeros([BLOCK_M], tl.float32)
            more = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            more, more_peak, more_total = _attend_latents(
                tl.maximum(start, base), tl.minimum(base + UNIT, end), queries, rope_queries, position,
                more, more_peak, more_total, latents, rope_keys, latent_scales, rope_scales, table,
                latent_stride, rope_stride, latent_scales_stride, rope_scales_stride, scale,
                RANK, ROPE, SIZE, BLOCK_N, BLOCK_D, BLOCK_R, PRECISION, KIND, CONVERT,
            )  # fmt: skip
            peak, total, keep, add = _fold(peak, total, more_peak, more_total)
            acc = tl.fma(acc, keep[:, None] + tl.zeros_like(acc), more * add[:, None])
    else:
        acc, peak, total = _attend_latents(
            start, end, queries, rope_queries, position, acc, peak, total, latents, rope_keys, latent_scales,
            rope_scales, table, latent_stride, rope_stride, latent_scales_stride, rope_scales_stride, scale,
            RANK, ROPE, SIZE, BLOCK_N, BLOCK_D, BLOCK_R, PRECISION, KIND, CONVERT,
        )  # fmt: skip
    FACTOR: tl.constexpr = 1.0 / _value_scale_factor(KIND)
    # The last number of an item is always 0. The compiler does not know that, so it computes the addresses of the
    # results here, and holds none of them in registers during the loop.
    rows = tl.arange(0, BLOCK_M) + tl.load(item + 7, volatile=True)
    first_token, count, slot = tl.load(item + 1), tl.load(item + 2), tl.load(item + 6)
    query, heads = rows // PACK, work % TILES * PACK + rows % PACK
    in_rows, tokens = query < count, (first_token + query).to(tl.int64)
    if slot >= 0:
        at = (slot + query).to(tl.int64) * HEADS + heads
        tl.store(peaks + at, peak, in_rows)
        tl.store(sums + at, total, in_rows)
        _store_rows(mid + at * RANK, acc * FACTOR, in_rows, RANK, BLOCK_M, BLOCK_D, KIND)
    else:
        at = tokens * HEADS + heads
        y = acc * FACTOR / tl.where(total > 0, total, 1.0)[:, None]
        _store_rows(out + at * RANK, y, in_rows, RANK, BLOCK_M, BLOCK_D, KIND)
        if lse is not None:
            tl.store(lse + at, (peak + tl.log2(total)) / _LOG2_E, in_rows)


@triton.jit
def _store_rows(to, y, in_rows, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr):
    """Store y [BLOCK_M, BLOCK_D] in the rows that begin at `to`, half of the columns at a time: all at once take more
    registers than 64 rows of 512 sums leave."""
    PART: tl.constexpr = BLOCK_D // 4
    HALF: tl.constexpr = RANK // 2 if KIND == 3 else BLOCK_D // 2
    halves, place = tl.arange(0, 2)[:, None], tl.arange(0, PART)[None]
    parts = tl.reshape(y.to(to.dtype.element_ty), (BLOCK_M, 2, 2, PART))
    first, second = tl.split(tl.permute(parts, (0, 1, 3, 2)))
    at, mask = to[:, None, None] + (halves * HALF + place)[None], in_rows[:, None, None]
    if RANK == BLOCK_D:
        tl.store(at, first, mask)
        tl.store(at + PART, second, mask)
    else:
        inner = place + halves * (0 if KIND == 3 else HALF)
        END: tl.constexpr = HALF if KIND == 3 else RANK
        tl.store(at, first, mask & (inner < END)[None])
        tl.store(at + PART, second, mask & (inner + PART < END)[None])


@triton.jit
def _dims(DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """(index of the element of a row at each position of a block, whether it exists). The two halves of an int4 row are
    in the two halves of the block."""
    place = tl.arange(0, BLOCK)
    if KIND == 3:
        half = place % (BLOCK // 2)
        dims, inside = half + place // (BLOCK // 2) * (DIM // 2), half < DIM // 2
    else:
        dims, inside = place, place < DIM
    return dims, inside


@triton.jit
def _attend_latents(
    start, end, queries, rope_queries, position, acc, peak, total, latents, rope_keys, latent_scales, rope_scales,
    table, latent_stride, rope_stride, latent_scales_stride, rope_scales_stride, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """(acc, peak, total) with the keys from `start` to `end`: weighted latents, running maximum and sum of exp2."""
    across = tl.arange(0, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        keys = first + across
        held = keys < end
        nth, row = _locate_keys(first, across, SIZE, BLOCK_N)
        block = tl.load(table + nth, held, other=0).to(tl.int64)
        latent = _rows(latents, block * latent_stride, row, held, queries.dtype, RANK, BLOCK_D, KIND, CONVERT)
        rope_key = _rows(rope_keys, block * rope_stride, row, held, queries.dtype, ROPE, BLOCK_R, KIND, CONVERT)
        score = tl.dot(rope_queries, tl.trans(rope_key), input_precision=PRECISION)
        factor = tl.full([BLOCK_N], 1.0, tl.float32)
        if KIND > 0:
            factor = tl.load(latent_scales + block * latent_scales_stride + row, held, other=0.0).to(tl.float32)
            rope_factor = tl.load(rope_scales + block * rope_scales_stride + row, held, other=0.0).to(tl.float32)
            factor = tl.where(factor == 0, 1.0, factor)  # a latent of zeros has the scale 0
            score *= (rope_factor / factor)[None]
        score = tl.dot(queries, tl.trans(latent), score, input_precision=PRECISION)
        if KIND > 0:
            score *= factor[None]
        score = tl.where(held[None] & (keys[None] <= position[:, None]), score * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight, decay = tl.exp2(score - base[:, None]), tl.exp2(peak - base)
        total = total * decay + tl.sum(weight, 1)
        if KIND > 0:
            factor *= _value_scale_factor(KIND)
            weight *= tl.where(factor > 65504.0, 65504.0, factor)[None]
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(queries.dtype), latent, acc, input_precision=PRECISION)
        peak = top
    return acc, peak, total


@triton.jit
def _rows(
    pool, block, row, held, dtype: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    CONVERT: tl.constexpr,
):  # fmt: skip
    """Rows of the pool without their scales, `dtype` [keys, BLOCK]. Keys that are not `held` are not loaded, because
    their memory could be NaN: they are zeros, or -8 with int4. `block`: the first element of each key's block."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
    PLACES: tl.constexpr = BLOCK // 2 if KIND == 3 else BLOCK
    place = tl.arange(0, PLACES)
    at = pool + (block + row * WIDTH)[:, None] + place[None]
    own = tl.load(at, held[:, None] & (place < WIDTH)[None], other=0)
    if KIND == 3:
        low, high = _nibbles(own, CONVERT, dtype, True)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (own.shape[0], BLOCK))
    else:
        return _widened(own, KIND, CONVERT, dtype, False)
