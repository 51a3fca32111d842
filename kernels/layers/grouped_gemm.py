"""The products of a mixture of experts in Triton (formulas and shapes: experts.py).

    sort      pairs (token, choice) in the order of their experts, and the tiles of rows: each has rows of one expert
    gate_up   gated[row] = act(gate_e(x)) * up_e(x),   rows in the sorted order
    down      y[pair] = down_e(gated[row]),            rounded to the dtype of x; codes as in quantised_linear.py
    sum       out[t] = sum over j of weights[t, j] * y[t, j] + sigmoid(shared_gate[t]) * shared[t], in float32

All shapes depend on the number of tokens alone, and the host reads nothing, so CUDA graphs can capture the calls. There
are as many programs as there could be tiles; those beyond the last tile end at once. Of the experts of other ranks
nothing is computed or read. Pairs of one expert stay in the order of their tokens. `pick_launch` takes high tiles for
many rows; with `batch_invariant` all tiles have one height, because the order of a sum may depend on it.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.layers.quantised_linear import Codes, _multiply

_HIGH_FROM: int = 32  # rows of an expert
_PAIRS: int = 1024  # that a program sorts at a time
_COLUMNS: int = 1024  # of a program of the weighted sum
_MAX_QUANTISED_STAGES: int = 3  # more may not fit beside the weights of a tile


class GroupedLaunch(NamedTuple):
    """A tile: `block_m` rows of one expert by `block_n` features, `block_k` of the depth at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def pick_launch(
    pairs: int, experts: int, element_size: int, gpu: GpuProperties, *, batch_invariant: bool = False
) -> GroupedLaunch:
    """`pairs`: of tokens and experts, over all `experts` of the layer."""
    is_high = pairs > _HIGH_FROM * experts and not batch_invariant
    # float32 products with 64 rows would spill.
    block_m, block_n, block_k = (64, 64, 64) if element_size == 2 else (32, 64, 32)
    if not is_high:
        block_m = 16
    # A stage holds a part of x, of the gates and of the ups.
    stage = (block_m + 2 * block_n) * block_k * element_size
    return GroupedLaunch(block_m, block_n, block_k, 4, min(gpu.max_stages, 4, gpu.shared // stage))


def warm_up_lengths(top_k: int, experts: int) -> tuple[int, int]:
    """Numbers of tokens that together take every launch that `pick_launch` picks."""
    return 1, _HIGH_FROM * experts // top_k + 1


class Weights(NamedTuple):
    """A rank's experts: gate_up [experts, 2 * I, hidden], down [experts, hidden, I], biases or None. Codes are those of
    all experts' rows, one expert below the other. `inner`: I."""

    gate_up: Tensor | Codes
    down: Tensor | Codes
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    experts: int
    inner: int
    first: int
    activation: int
    alpha: float
    limit: float


def grouped_experts(
    w: Weights,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    batch_invariant: bool,
) -> Tensor:
    """The output of PackedExperts.forward. The arguments must be checked already."""
    tokens, top_k = ids.shape
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    experts, hidden, inner = w.experts, x.shape[1], w.inner
    pairs, device = tokens * top_k, x.device
    gpu = gpu_properties(device)
    launch = pick_launch(pairs, experts, x.element_size(), gpu, batch_invariant=batch_invariant)
    max_tiles = min(pairs, pairs // launch.block_m + experts)
    counts, ends = torch.empty((2, experts), dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((max_tiles, 2), dtype=torch.int32, device=device)
    _count_pairs[(experts,)](ids, counts, pairs, w.first, BLOCK=_PAIRS, num_warps=4)
    _sort_pairs[(experts,)](
        ids, counts, ends, order, tiles, pairs, max_tiles, w.first, experts, EXPERTS=triton.next_power_of_2(experts),
        TILE=launch.block_m, BLOCK=_PAIRS, num_warps=4,
    )  # fmt: skip
    gated, y = x.new_empty((pairs, inner)), x.new_empty((pairs, hidden))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    blocks = dict(BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, PRECISION=precision, num_warps=launch.num_warps)
    plain = dict(BLOCK_K=launch.block_k, num_stages=launch.num_stages, **blocks)
    grid = (max_tiles, triton.cdiv(inner, launch.block_n))
    if isinstance(w.gate_up, Codes):
        codes, sizes, constants = w.gate_up.arguments(gpu)
        _quantised_gate_up[grid](
            x, *codes, w.gate_up_bias, gated, order, tiles, ends, hidden, inner, *sizes, w.alpha, w.limit, TOP_K=top_k,
            ACTIVATION=w.activation, **constants, **blocks, num_stages=min(launch.num_stages, _MAX_QUANTISED_STAGES),
        )  # fmt: skip
    else:
        _gate_up[grid](
            x, w.gate_up, w.gate_up_bias, gated, order, tiles, ends, hidden, inner, w.alpha, w.limit, TOP_K=top_k,
            ACTIVATION=w.activation, **plain,
        )  # fmt: skip
    grid = (max_tiles, triton.cdiv(hidden, launch.block_n))
    if isinstance(w.down, Codes):
        codes, sizes, constants = w.down.arguments(gpu)
        _quantised_down[grid](
            gated, *codes, w.down_bias, y, order, tiles, ends, inner, hidden, *sizes, **constants, **blocks,
            num_stages=min(launch.num_stages, _MAX_QUANTISED_STAGES),
        )  # fmt: skip
    else:
        _down[grid](gated, w.down, w.down_bias, y, order, tiles, ends, inner, hidden, **plain)
    _weighted_sum[(tokens, triton.cdiv(hidden, _COLUMNS))](
        y, ids, weights, shared, shared_gate, out, hidden, w.first, experts, TOP_K=top_k, BLOCK=_COLUMNS, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["pairs", "first"])
def _count_pairs(ids, counts, pairs, first, BLOCK: tl.constexpr):
    """One program counts the pairs of one expert."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        total += (tl.load(ids + start + at, start + at < pairs, other=-1) == expert + first).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs", "max_tiles", "first"])
def _sort_pairs(
    ids, counts, ends, order, tiles, pairs, max_tiles, first, experts, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one expert's pairs to `order` [pairs] and its tiles, (expert, first row), to `tiles`. The last
    program writes -1 as the expert of the tiles that are left over."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts + every, every < experts, other=0)
    needed = (count + TILE - 1) // TILE
    begin = tl.sum(tl.where(every < expert, count, 0), 0)
    first_tile = tl.sum(tl.where(every < expert, needed, 0), 0)
    mine = tl.sum(tl.where(every == expert, count, 0), 0)
    end_tile = first_tile + (mine + TILE - 1) // TILE
    tl.store(ends + expert, begin + mine)
    for start in range(first_tile, end_tile, BLOCK):
        tile = start + at
        tl.store(tiles + 2 * tile, tl.zeros([BLOCK], tl.int32) + expert, tile < end_tile)
        tl.store(tiles + 2 * tile + 1, begin + (tile - first_tile) * TILE, tile < end_tile)
    if expert == experts - 1:
        for start in range(end_tile, max_tiles, BLOCK):
            tl.store(tiles + 2 * (start + at), tl.full([BLOCK], -1, tl.int32), start + at < max_tiles)
    for start in range(0, pairs, BLOCK):
        is_mine = (tl.load(ids + start + at, start + at < pairs, other=-1) == expert + first).to(tl.int32)
        tl.store(order + begin + tl.cumsum(is_mine, 0) - 1, start + at, is_mine > 0)
        begin += tl.sum(is_mine, 0)


@triton.jit
def _gate_up(
    x, weight, bias, gated, order, tiles, ends, hidden, width, alpha, limit, TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of `gated` [pairs, width]."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    token = pair // TOP_K
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = n < width
    from_x = x + token[:, None] * hidden + k[None, :]
    from_gate = weight + (expert * 2 * width + n)[None, :] * hidden + k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        has_k = k < hidden - start
        a = tl.load(from_x + start, has_row[:, None] & has_k[None, :], other=0.0)
        mask = has_k[:, None] & has_n[None, :]
        gate = tl.dot(a, tl.load(from_gate + start, mask, other=0.0), gate, input_precision=PRECISION)
        up_part = tl.load(from_gate + width.to(tl.int64) * hidden + start, mask, other=0.0)
        up = tl.dot(a, up_part, up, input_precision=PRECISION)
    if bias is not None:
        gate += tl.load(bias + expert * 2 * width + n, has_n, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + expert * 2 * width + width + n, has_n, other=0.0).to(tl.float32)[None, :]
    result = _activated(gate, up, alpha, limit, ACTIVATION)
    to = gated + row.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(to, result.to(gated.dtype.element_ty), has_row[:, None] & has_n[None, :])


@triton.jit
def _rows_of_tile(order, tiles, ends, expert, BLOCK_M: tl.constexpr):
    """The program's sorted rows, which of them `expert` has, and their pairs of token and choice."""
    row = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    has_row = row < tl.load(ends + expert)
    return row, has_row, tl.load(order + row, has_row, other=0).to(tl.int64)


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == 2:
        gate = tl.minimum(gate, limit)
        u = alpha * gate
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    elif ACTIVATION == 1:
        u = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    else:
        u = gate
    return gate / (1.0 + tl.exp(-u)) * up


@triton.jit
def _quantised_gate_up(
    x, codes, scales, zeros, bias, gated, order, tiles, ends, hidden, width, features, row_bytes, group, alpha, limit,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, KIND: tl.constexpr, CONVERT: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As _gate_up, over codes: the gates' products, then the ups'. `features`: rows of all experts."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    token = pair // TOP_K
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = n < width
    gates = expert * 2 * width + n
    gate = _multiply(
        x, codes, scales, zeros, None, token, gates, has_row, has_n, features, hidden, row_bytes, group,
        KIND, CONVERT, STEP, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    up = _multiply(
        x, codes, scales, zeros, None, token, gates + width, has_row, has_n, features, hidden, row_bytes, group,
        KIND, CONVERT, STEP, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    if bias is not None:
        gate += tl.load(bias + gates, has_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + gates + width, has_n, other=0.0).to(tl.float32)[:, None]
    result = _activated(gate, up, alpha, limit, ACTIVATION)
    to = gated + row.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(to, result.to(gated.dtype.element_ty), has_row[None, :] & has_n[:, None])


@triton.jit
def _quantised_down(
    gated, codes, scales, zeros, bias, y, order, tiles, ends, width, hidden, features, row_bytes, group,
    KIND: tl.constexpr, CONVERT: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As _down, over codes."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = n < hidden
    of_expert = expert * hidden + n
    sums = _multiply(
        gated, codes, scales, zeros, None, row, of_expert, has_row, has_n, features, width, row_bytes, group,
        KIND, CONVERT, STEP, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + of_expert, has_n, other=0.0).to(tl.float32)[:, None]
    to = y + pair[None, :] * hidden + n[:, None]
    tl.store(to, sums.to(y.dtype.element_ty), has_row[None, :] & has_n[:, None])


@triton.jit
def _down(
    gated, weight, bias, y, order, tiles, ends, width, hidden, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of rows of `y` [pairs, hidden]."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = n < hidden
    from_x = gated + row.to(tl.int64)[:, None] * width + k[None, :]
    from_weight = weight + (expert * hidden + n)[None, :] * width + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        has_k = k < width - start
        a = tl.load(from_x + start, has_row[:, None] & has_k[None, :], other=0.0)
        b = tl.load(from_weight + start, has_k[:, None] & has_n[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if bias is not None:
        sums += tl.load(bias + expert * hidden + n, has_n, other=0.0).to(tl.float32)[None, :]
    to = y + pair[:, None] * hidden + n[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), has_row[:, None] & has_n[None, :])


@triton.jit(do_not_specialize=["first"])
def _weighted_sum(
    y, ids, weights, shared, shared_gate, out, hidden, first, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program computes a part of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids + pair) - first
        is_here = (expert >= 0) & (expert < experts)
        row = tl.load(y + pair * hidden + column, mask & is_here, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * row
    if shared is not None:
        row = tl.load(shared + token * hidden + column, mask, other=0.0).to(tl.float32)
        if shared_gate is not None:
            row = row / (1.0 + tl.exp(-tl.load(shared_gate + token).to(tl.float32)))
        total += row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask)
