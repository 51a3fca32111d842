"""The floor of a row: min-p, top-k and top-p remove the logits below it. It is found without sorting the row.

    l = logits / temperature
    floor = max(max(l) + log(min_p),  the k-th largest l,
                the largest v such that the mass of {l >= v} reaches top_p of the mass of those kept)

Shapes: as in sample.py, which defines the mass; returns float32 [R], -inf for rows without filters. Of equal logits all
or none are kept, as in `filter_reference` of sample.py. Only the rounding of exp differs from it.

Logits are compared as 32-bit keys in the order of their values. Three kernels find the floors:

    _lane_maxima    SLICES programs per row. Writes the largest logit of each of 4,096 lanes. A lane has the token ids
                    that are equal mod 4,096.
    _collect        SLICES programs per row. Writes the candidates: the logits that are at least the n-th largest lane
                    maximum (n = k, or 512 for top-p alone). These are at least n logits, usually few more, and the k
                    largest are among them. Also writes the mass of the slice.
    _filter_floor   One program per row. Finds the largest key at which a count (top-k) or a mass (top-p) is reached,
                    among the candidates, two bits at a time, from the highest bits on.

So a row is read twice. If there are more candidates than PLACES (ties), or if they have less mass than top-p needs
(flat distributions), _filter_floor reads the row again for every two bits. Rows without filters are not read. All sums
are sums of integers. With top-k the floor depends on the row's k largest logits alone.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

MASS_UNITS = float(1 << 40)  # the mass of the largest logit; that of 2^18 tokens is at most 2^58, and fits int64
_UNITS = tl.constexpr(MASS_UNITS)


@triton.jit
def _mass(difference):
    """int64: the mass of a logit. `difference`: the logit minus the largest one."""
    return (tl.exp(difference) * _UNITS).to(tl.int64)


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
    """For each of a, b and c: the number (MASS: mass) of elements at or above both that key and `low`, int64."""
    sum_a = tl.zeros([BLOCK], tl.int64)
    sum_b, sum_c = sum_a, sum_a
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, ids < vocab, other=float("-inf")) / temp
        key = _ordered(x)
        weight = _mass(x - top) if MASS else tl.full([BLOCK], 1, tl.int64)
        weight = tl.where((ids < vocab) & (key >= low), weight, 0)
        sum_a += tl.where(key >= a, weight, 0)
        sum_b += tl.where(key >= b, weight, 0)
        sum_c += tl.where(key >= c, weight, 0)
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


@triton.jit
def _largest_of(key, weight, goal):
    """As _largest_key, for keys that are in registers, with their weights."""
    found = tl.full([], 0, tl.uint32)
    one = tl.full([], 0x40000000, tl.uint32)
    for _ in range(16):
        a, b, c = found + one, found + one + one, found + one + one + one
        at_a = tl.sum(tl.where(key >= a, weight, 0), 0)
        at_b = tl.sum(tl.where(key >= b, weight, 0), 0)
        at_c = tl.sum(tl.where(key >= c, weight, 0), 0)
        found = tl.where(at_c >= goal, c, tl.where(at_b >= goal, b, tl.where(at_a >= goal, a, found)))
        one = one >> 2
    return found


@triton.jit
def _goal(whole, number, k, low, top, p):
    """The mass that top-p must reach, if `number` elements with the mass `whole` are at or above the key `low`."""
    more = tl.where(k > 0, tl.maximum(number - k, 0), 0)  # elements beyond k; all are equal to the k-th
    kept = whole - more * _mass(_unordered(low) - top)
    return tl.maximum(tl.ceil(p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _limits(temperature, top_k, top_p, min_p, index, vocab):
    """(temperature, k, p, min-p) of a row. k is 0 if top-k removes nothing; all filters are off at temperature 0."""
    temp, k = tl.load(temperature + index), tl.load(top_k + index)
    p, least = tl.load(top_p + index), tl.load(min_p + index)
    is_drawn = temp > 0
    k = tl.where(is_drawn & (k > 0) & (k < vocab), k, 0)
    return temp, k, tl.where(is_drawn, p, 1.0), tl.where(is_drawn, least, 0.0)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p"])
def _lane_maxima(
    logits, temperature, top_k, top_p, min_p, maxima, stride, vocab,
    SLICES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, k, p, least = _limits(temperature, top_k, top_p, min_p, index, vocab)
    if (k > 0) | (p < 1) | (least > 0):
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(part * BLOCK, vocab, SLICES * BLOCK):
            ids = first + tl.arange(0, BLOCK)
            x = tl.load(logits + index * stride + ids, ids < vocab, other=float("-inf"))
            tops = tl.maximum(tops, x / temp)
        lanes = tl.max(tl.reshape(tops, [LANES, BLOCK // LANES]), 1)
        tl.store(maxima + (index * SLICES + part) * LANES + tl.arange(0, LANES), lanes)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p"])
def _collect(
    logits, temperature, top_k, top_p, min_p, maxima, candidates, counts, masses, stride, vocab,
    SLICES: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, k, p, least = _limits(temperature, top_k, top_p, min_p, index, vocab)
    if (k > 0) | (p < 1):
        lanes = tl.load(maxima + index * SLICES * LANES + tl.arange(0, SLICES * LANES))
        top = tl.max(lanes, 0)
        low = top + tl.log(least)  # -inf without min-p
        bound = _largest_of(_ordered(lanes), tl.full([SLICES * LANES], 1, tl.int32), tl.where(k > 0, k, WANTED))
        count = tl.full([], 0, tl.int32)
        mass = tl.zeros([BLOCK], tl.int64)
        for first in range(part * BLOCK, vocab, SLICES * BLOCK):
            ids = first + tl.arange(0, BLOCK)
            x = tl.load(logits + index * stride + ids, ids < vocab, other=float("-inf")) / temp
            is_candidate = (_ordered(x) >= bound) & (x > float("-inf"))
            mass += tl.where((x >= low) & (x > float("-inf")), _mass(x - top), 0)
            place = count + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            at = (index * SLICES + part) * PLACES + place
            tl.store(candidates + at, x, is_candidate & (place < PLACES))
            count += tl.sum(is_candidate.to(tl.int32), 0)
        tl.store(counts + index * SLICES + part, count)
        tl.store(masses + index * SLICES + part, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p"])
def _filter_floor(
    logits, temperature, top_k, top_p, min_p, maxima, candidates, counts, masses, floors, stride, vocab,
    SLICES: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    temp, k, p, least = _limits(temperature, top_k, top_p, min_p, index, vocab)
    row = logits + index * stride
    floor = tl.full([], float("-inf"), tl.float32)
    if (k > 0) | (p < 1) | (least > 0):
        top = tl.max(tl.load(maxima + index * SLICES * LANES + tl.arange(0, SLICES * LANES)), 0)
        low = tl.full([], 0, tl.uint32)
        if least > 0:
            floor = top + tl.log(least)
            low = _ordered(floor)
        if (k > 0) | (p < 1):
            slice_of = tl.arange(0, SLICES)
            count = tl.load(counts + index * SLICES + slice_of)
            is_complete, total = tl.max(count, 0) <= PLACES, tl.sum(count, 0)
            place = tl.arange(0, SLICES * PLACES)
            is_held = place % PLACES < tl.load(counts + index * SLICES + place // PLACES)
            x = tl.load(candidates + index * SLICES * PLACES + place, is_held, other=float("-inf"))
            key = _ordered(x)
            if k > 0:
                # k counts over the whole row. That is exact with min-p too: if min-p removes one of the k largest, its
                # floor is above the k-th. The initial value is the key of -inf, for a row with fewer than k finite
                # logits; key 0 would be a NaN.
                kth = tl.full([], 0x007FFFFF, tl.uint32)
                if is_complete:
                    if total >= k:
                        kth = _largest_of(key, is_held.to(tl.int32), k)
                else:
                    kth = _largest_key(row, temp, vocab, tl.full([], 0, tl.uint32), k, top, False, BLOCK)
                low = tl.maximum(low, kth)
            if p < 1:
                is_kept = is_held & (key >= low)
                weight = tl.where(is_kept, _mass(x - top), 0)
                held = tl.sum(weight, 0)
                number = tl.sum(is_kept.to(tl.int32), 0).to(tl.int64)
                whole = held  # with top-k only candidates are kept
                if k == 0:
                    whole = tl.sum(tl.load(masses + index * SLICES + slice_of), 0)
                goal = _goal(whole, number, k, low, top, p)
                if is_complete & (held >= goal):
                    low = tl.maximum(low, _largest_of(key, weight, goal))
                else:
                    whole, _, _ = _weight_at_least(row, temp, vocab, low, low, low, low, top, True, BLOCK)
                    number, _, _ = _weight_at_least(row, temp, vocab, low, low, low, low, top, False, BLOCK)
                    goal = _goal(whole, number, k, low, top, p)
                    low = tl.maximum(low, _largest_key(row, temp, vocab, low, goal, top, True, BLOCK))
        floor = _unordered(low)
    tl.store(floors + index, floor)


SLICES = 8  # programs that share a row
LANES = 512  # lanes of a slice
PLACES = 1024  # the most candidates of a slice
_WANTED = 512  # the fewest candidates of a row for top-p alone


def filter_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [R]: the floors of logits on a GPU. The caller has checked the arguments."""
    rows, vocab = logits.shape
    new = logits.new_empty
    floors, maxima, candidates = new(rows), new(rows, SLICES * LANES), new(rows, SLICES * PLACES)
    masses, counts = new(rows, SLICES, dtype=torch.int64), new(rows, SLICES, dtype=torch.int32)
    if rows:
        limits = (temperature, top_k, top_p, min_p)
        slices = dict(SLICES=SLICES, LANES=LANES)
        strides = (logits.stride(0), vocab)
        _lane_maxima[(rows, SLICES)](logits, *limits, maxima, *strides, **slices, BLOCK=2048, num_warps=8)
        _collect[(rows, SLICES)](
            logits, *limits, maxima, candidates, counts, masses, *strides,
            **slices, PLACES=PLACES, WANTED=_WANTED, BLOCK=2048, num_warps=8,
        )  # fmt: skip
        _filter_floor[(rows,)](
            logits, *limits, maxima, candidates, counts, masses, floors, *strides,
            **slices, PLACES=PLACES, BLOCK=4096, num_warps=16,
        )  # fmt: skip
    return floors
