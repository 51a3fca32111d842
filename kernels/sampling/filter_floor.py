"""The threshold below which min-p, top-k and top-p remove a row's logits from the draw, without sorting the row.

    l = logits / temperature
    floor = max(max(l) + log(min_p),  the k-th largest l,
                the largest v such that softmax mass of {l >= v} among those kept reaches top_p)

Shapes: as in sample.py; returns float32 [R], -inf for rows without filters. Equal logits stay or go together, as in
`filter_reference` of sample.py. Only the rounding of the mass differs from it (float32 here).

One program finds the floor of one row. Logits are compared as 32-bit keys in the order of their values. The largest key
at which a count (top-k) or a mass (top-p) is reached is found bit by bit from the highest, two bits in each pass over
the row. Rows without filters are not read.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


@triton.jit
def _ordered(x):
    """uint32 keys that compare as the float32 values do."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _unordered(key):
    bits = tl.where(key >= 0x80000000, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight_at_least(row, temp, vocab, low, a, b, c, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of a, b and c: the number (MASS: softmax mass) of elements at or above both that key and `low`."""
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b, sum_c = sum_a, sum_a
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, ids < vocab, other=float("-inf")) / temp
        key = _ordered(x)
        weight = tl.exp(x - top) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        weight = tl.where((ids < vocab) & (key >= low), weight, 0.0)
        sum_a += tl.where(key >= a, weight, 0.0)
        sum_b += tl.where(key >= b, weight, 0.0)
        sum_c += tl.where(key >= c, weight, 0.0)
    return tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.sum(sum_c, 0)


@triton.jit
def _largest_key(row, temp, vocab, low, goal, top, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the count or mass at or above it reaches `goal`."""
    found = tl.full([], 0, tl.uint32)
    one = tl.full([], 0x40000000, tl.uint32)
    for _ in range(16):
        a, b, c = found + one, found + one + one, found + one + one + one
        at_a, at_b, at_c = _weight_at_least(row, temp, vocab, low, a, b, c, top, MASS, BLOCK)
        found = tl.where(at_c >= goal, c, tl.where(at_b >= goal, b, tl.where(at_a >= goal, a, found)))
        one = one >> 2
    return found


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "floors"])
def _filter_floor(logits, temperature, top_k, top_p, min_p, floors, stride, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    temp, k = tl.load(temperature + index), tl.load(top_k + index)
    p, least = tl.load(top_p + index), tl.load(min_p + index)
    row = logits + index * stride
    floor = tl.full([], float("-inf"), tl.float32)
    if (temp > 0) & ((least > 0) | ((k > 0) & (k < vocab)) | (p < 1)):
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, tl.load(row + ids, ids < vocab, other=float("-inf")) / temp)
        top = tl.max(tops, 0)
        low = tl.full([], 0, tl.uint32)
        if least > 0:
            floor = top + tl.log(least)
            low = _ordered(floor)
        if (k > 0) & (k < vocab):
            # Counted over the whole row: if min-p removes one of the k largest, its floor is above the k-th.
            kth = _largest_key(row, temp, vocab, tl.full([], 0, tl.uint32), k.to(tl.float32), top, False, BLOCK)
            low = tl.maximum(low, kth)
        if p < 1:
            whole, _, _ = _weight_at_least(row, temp, vocab, low, low, low, low, top, True, BLOCK)
            low = tl.maximum(low, _largest_key(row, temp, vocab, low, p * whole, top, True, BLOCK))
        floor = _unordered(low)
    tl.store(floors + index, floor)


def filter_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The floors of CUDA logits, which `sample` has checked. On CPU the C library finds floors while it draws."""
    floors = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _filter_floor[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, floors, logits.stride(0), logits.shape[1],
            BLOCK=4096, num_warps=16,
        )  # fmt: skip
    return floors
