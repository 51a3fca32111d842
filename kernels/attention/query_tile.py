"""The inner loop of attention: one tile of queries over a range of its sequence's keys.

    peak, total, acc = running maximum, sum of exp and weighted values of each row (online softmax)

A device function for paged_tiles.py, which handles sequences, windows and sinks.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from coatcheck.kernels.attention.online_softmax import _accumulate_tile, _scores
from coatcheck.kernels.kv.quantise import _locate_keys, _scales_of

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    start, end, queries, high_queries, position, acc, high_acc, peak, total,
    k, v, k_scales, v_scales, table, kv_head,
    k_stride, v_stride, k_scales_stride, v_scales_stride, scale, softcap, window,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(acc, high_acc, peak, total) with the keys from `start` to `end`. Not MASKED: every query attends to all of these
    keys, and they fill whole tiles.

    Scores become exponents of 2, because the GPU computes exp2. Without a softcap `scale` includes log2(e); with a
    softcap, the cap includes it. If the pool is quantised, `scale` has one value for each row.
    """
    dims, across = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    slope = scale[:, None] if KIND > 0 else scale
    for first in range(start, end, BLOCK_N):
        keys = first + across
        held = keys < end
        nth, row = _locate_keys(first, across, SIZE, BLOCK_N)
        if MASKED:
            block = tl.load(table + nth, held, other=0).to(tl.int64)
        else:
            block = tl.load(table + nth).to(tl.int64)
        at = (kv_head * SIZE + row) * WIDTH
        v_scale = scale  # a placeholder; it is not read if KIND is 0
        if KIND > 0:
            k_scale, v_scale = _scales_of(
                k_scales, v_scales, table, first, end, held, kv_head, k_scales_stride, v_scales_stride,
                KIND, SIZE, BLOCK_N, MASKED,
            )  # fmt: skip
        # Keys from `end` on are read from block 0, and their scores are masked. Their values could be NaN, so 0 is
        # read.
        at_key = k + (block * k_stride + at)[:, None] + dims[None]
        at_value = v + (block * v_stride + at)[:, None] + dims[None]
        if WIDTH == BLOCK_D:
            key = tl.load(at_key)
            value = tl.load(at_value, held[:, None], other=0) if MASKED else tl.load(at_value)
        else:
            inside = (dims < WIDTH)[None]
            key = tl.load(at_key, inside, other=0)
            value = tl.load(at_value, (held[:, None] & inside) if MASKED else inside, other=0)
        score = _scores(queries, high_queries, key, PRECISION, KIND, CONVERT)
        if KIND > 0:
            score *= k_scale[None]
        if CAPPED:
            score *= slope
            if softcap > 0:
                bend, cap = 2.0 * _LOG2_E / softcap, softcap * _LOG2_E
                bent = tl.minimum(score * bend, 90.0, propagate_nan=tl.PropagateNan.ALL)
                score = cap - 2.0 * cap / (tl.exp2(bent) + 1.0)
        if MASKED:
            seen = (keys[None] <= position[:, None]) & ((window <= 0) | (keys[None] > position[:, None] - window))
            score = tl.where(seen, score, float("-inf"))
        acc, high_acc, peak, total = _accumulate_tile(
            score, slope, scale, value, v_scale, acc, high_acc, peak, total, queries.dtype,
            PRECISION, KIND, CONVERT, CAPPED, MASKED,
        )  # fmt: skip
    return acc, high_acc, peak, total
