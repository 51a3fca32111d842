"""Online softmax over tiles of keys: the scores of a tile, and the update of the running sums by its values.

    peak, total, acc = running maximum, sum of exp and weighted values of each row, before any division

Device functions for query_tile.py, which finds the keys and applies masks and softcaps.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from coatcheck.kernels.kv.quantise import _nibbles, _widened


@triton.jit
def _scores(queries, high_queries, key, PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr):
    """Queries times the keys of the pool, without the keys' scales: float32 [rows, keys]. `high_queries`: for int4, the
    second half of each query."""
    if KIND == 3:
        low, high = _nibbles(key, CONVERT, queries.dtype, True)
        score = tl.dot(queries, tl.trans(low), input_precision=PRECISION)
        score = tl.dot(high_queries, tl.trans(high), score, input_precision=PRECISION)
    else:
        key = _widened(key, KIND, CONVERT, queries.dtype, True)
        score = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
    return score


@triton.jit
def _accumulate_tile(
    score, slope, scale, value, v_scale, acc, high_acc, peak, total, dtype: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(acc, high_acc, peak, total) after one more tile.

    If CAPPED, `score` has exponents of 2. Otherwise `score * slope` has them; `slope` is `scale` in the shape of the
    scores. `v_scale` is read if KIND is above 0, `high_acc` for int4. If not MASKED, no row may be all -inf. Weights
    are rounded to `dtype`.
    """
    top = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    if CAPPED:
        weight, decay = tl.exp2(score - base[:, None]), tl.exp2(peak - base)
    else:
        weight, decay = tl.exp2(score * slope - (base * scale)[:, None]), tl.exp2((peak - base) * scale)
    total = total * decay + tl.sum(weight, 1)
    if KIND > 0:
        weight *= v_scale[None]
    weight = weight.to(dtype)
    if KIND == 3:
        value, high = _nibbles(value, CONVERT, dtype, False)
        high_acc = high_acc * decay[:, None] + tl.dot(weight, high, input_precision=PRECISION)
    else:
        value = _widened(value, KIND, CONVERT, dtype, False)
    acc = acc * decay[:, None] + tl.dot(weight, value, input_precision=PRECISION)
    return acc, high_acc, top, total
