"""The products of a mixture of experts in Triton (formulas and shapes: experts.py).

    sort      sorts the pairs (token, choice) by expert, and cuts them into tiles of rows (route.py)
    gate_up   gated[row] = act(gate_e(x)) * up_e(x),   rows in the sorted order
    down      y[pair] = down_e(gated[row]),            rounded to the dtype of x
    sum       out[t] = sum over j of weights[t, j] * y[t, j] + sigmoid(shared_gate[t]) * shared[t], in float32

Quantised weights have the layout of quantised_linear.py. If activations are quantised too (`Codes.format`), the
products are those of w8a8_linear.py. x is quantised once for each token, before its rows are gathered. If a group of
columns lies in one tile, gate_up writes gated as codes; otherwise a kernel between the two products quantises gated.
gated is rounded to the dtype of x first, so both ways give the same codes.

All shapes depend on the number of tokens alone, and the host reads nothing, so CUDA graphs can capture the calls. A
kernel is launched for the largest possible number of tiles; programs beyond the last tile return at once. Experts of
other ranks are neither read nor computed. Pairs of one expert stay in the order of their tokens. `pick_launch` picks
high tiles for many rows. With `batch_invariant` all tiles have one height, because the order of a sum may depend on it.
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
from coatcheck.kernels.kv.quantise import _quantised
from coatcheck.kernels.layers.quantised_linear import Codes, _multiply
from coatcheck.kernels.layers.quantised_rows import (
    QuantisedRows,
    RowFormat,
    _largest_magnitude,
    _scale_of_row,
    quantise_rows,
)
from coatcheck.kernels.layers.route import sort_pairs
from coatcheck.kernels.layers.w8a8_linear import _multiply_codes

# With more pairs than 16 for each expert, tiles have 64 rows; with more than 128 pairs, 128 rows.
_HIGH_FROM, _HIGHEST_FROM = 16, 128
_COLUMNS: int = 1024  # columns that a program of the weighted sum computes
_MAX_QUANTISED_STAGES: int = 3  # more may not fit into shared memory beside the weights of a tile
_LONGEST_STEP: int = 64  # columns of a product of codes with plain x
_CODE_COLUMNS: int = 128  # the most columns of a product of codes, and of a tile of gated rows written as codes
_ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class GroupedLaunch(NamedTuple):
    """A tile: `block_m` rows of one expert by `block_n` features, summed over `block_k` columns of x at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """The keyword arguments of a launch except BLOCK_K."""
        sizes = dict(BLOCK_M=self.block_m, BLOCK_N=self.block_n)
        return dict(**sizes, num_warps=self.num_warps, num_stages=self.num_stages)


def pick_launch(
    pairs: int, experts: int, element_size: int, gpu: GpuProperties, *, of_codes: bool = False,
    batch_invariant: bool = False,
) -> GroupedLaunch:  # fmt: skip
    """The tile of plain weights. `pairs`: tokens times choices. `experts`: of all ranks, because `pairs` counts choices
    of all. `of_codes`: whether activations are quantised for one of the products; with 128 rows its sums would spill
    registers."""
    # float32 products with 64 rows would spill.
    block_m, block_n, block_k = (64, 64, 64) if element_size == 2 else (32, 64, 32)
    num_warps = 4
    if pairs <= _HIGH_FROM * experts or batch_invariant:
        block_m = 16
    elif pairs > _HIGHEST_FROM * experts and element_size == 2 and gpu.warp_groups and not of_codes:
        block_m, block_n, num_warps = 128, 128, 8
    # A stage holds one block of x, one of the gates' weights and one of the ups' weights.
    stage = (block_m + 2 * block_n) * block_k * element_size
    return GroupedLaunch(block_m, block_n, block_k, num_warps, min(gpu.max_stages, 4, gpu.shared // stage))


def pick_codes_launch(launch: GroupedLaunch, weight: Codes, to: RowFormat | None, gpu: GpuProperties) -> GroupedLaunch:
    """The tile of a product with `weight`. `launch`: the tile of pick_launch. `to`: how the result is quantised."""
    if weight.format is None:
        stages = min(launch.num_stages, _MAX_QUANTISED_STAGES)
        return launch._replace(block_k=min(weight.step, _LONGEST_STEP), num_stages=stages)
    block_n = max(64, 0 if to is None else to.group)
    block_k = min(weight.format.group or _CODE_COLUMNS, _CODE_COLUMNS)
    num_warps = 8 if block_n > 64 and launch.block_m > 16 else 4
    stages = gpu.shared // (block_k * (block_n + launch.block_m))
    return GroupedLaunch(launch.block_m, block_n, block_k, num_warps, max(1, min(gpu.max_stages, 4, stages)))


def is_written_as_codes(gate_up: Codes, format: RowFormat) -> bool:
    """Whether gate_up's kernel writes codes for a `down` of this format: a group of columns must lie in one tile."""
    return gate_up.format is not None and 0 < format.group <= _CODE_COLUMNS


def warm_up_lengths(top_k: int, experts: int) -> tuple[int, ...]:
    """Numbers of tokens that together lead to every tile that `pick_launch` picks. `experts`: of all ranks."""
    return 1, _HIGH_FROM * experts // top_k + 1, _HIGHEST_FROM * experts // top_k + 1


class Weights(NamedTuple):
    """A rank's experts: gate_up [experts, 2 * I, hidden] and down [experts, hidden, I], each may have a bias.

    Codes have two dimensions: the rows of all experts are stacked, expert after expert. `inner`: I. `activation`: an
    index into ACTIVATIONS of experts.py. `experts`: of this rank, from id `first` on. `all_experts`: of all ranks.
    """

    gate_up: Tensor | Codes
    down: Tensor | Codes
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    experts: int
    all_experts: int
    inner: int
    first: int
    activation: int
    alpha: float
    limit: float


def grouped_experts(
    w: Weights,
    x: Tensor | QuantisedRows,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    batch_invariant: bool,
) -> Tensor:
    """out of PackedExperts.forward. The caller has checked the arguments; `x` has the format of gate_up."""
    (tokens, top_k), (_, hidden), device = ids.shape, x.shape, ids.device
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
    if tokens == 0:
        return out
    experts, inner, pairs = w.experts, w.inner, tokens * top_k
    gpu = gpu_properties(device)
    of_codes = any(isinstance(part, Codes) and part.format is not None for part in (w.gate_up, w.down))
    size = out.element_size()
    launch = pick_launch(pairs, w.all_experts, size, gpu, of_codes=of_codes, batch_invariant=batch_invariant)
    order, tiles, ends = sort_pairs(ids, experts, w.first, launch.block_m)
    max_tiles = len(tiles)
    precision = "ieee" if out.dtype == torch.float32 else "tf32"
    format = w.down.format if isinstance(w.down, Codes) else None
    gated, y = out.new_empty((pairs, inner)), out.new_empty((pairs, hidden))
    rows: Tensor | QuantisedRows = gated
    if isinstance(w.gate_up, Codes):
        to, constants = None, dict(TO_KIND=0, TO_GROUP=0)
        if format is not None and is_written_as_codes(w.gate_up, format):
            to, rows = format, QuantisedRows.empty(pairs, inner, format, out.dtype, device)
            constants = {f"TO_{name}": value for name, value in format.constants().items()}
        tile = pick_codes_launch(launch, w.gate_up, to, gpu)
        _quantised_gate_up[(max_tiles, triton.cdiv(inner, tile.block_n))](
            *_operands(w.gate_up, x), w.gate_up_bias, *_bytes_and_scales(rows), order, tiles, ends, tokens, pairs,
            hidden, inner, w.gate_up.shape[0], w.gate_up.codes.shape[1], w.alpha, w.limit,
            TOP_K=top_k, ACTIVATION=w.activation, ELEMENT=_ELEMENTS[out.dtype], PRECISION=precision,
            **constants, **_constants(w.gate_up, tile, gpu),
        )  # fmt: skip
    else:
        _gate_up[(max_tiles, triton.cdiv(inner, launch.block_n))](
            x, w.gate_up, w.gate_up_bias, gated, order, tiles, ends, hidden, inner, w.alpha, w.limit, TOP_K=top_k,
            ACTIVATION=w.activation, PRECISION=precision, BLOCK_K=launch.block_k, **launch.constants(),
        )  # fmt: skip
    if format is not None and rows is gated:
        rows = quantise_rows(gated, format)
    if isinstance(w.down, Codes):
        tile = pick_codes_launch(launch, w.down, None, gpu)
        _quantised_down[(max_tiles, triton.cdiv(hidden, tile.block_n))](
            *_operands(w.down, rows), w.down_bias, y, order, tiles, ends, pairs, inner, hidden, w.down.shape[0],
            w.down.codes.shape[1], PRECISION=precision, **_constants(w.down, tile, gpu),
        )  # fmt: skip
    else:
        _down[(max_tiles, triton.cdiv(hidden, launch.block_n))](
            gated, w.down, w.down_bias, y, order, tiles, ends, inner, hidden, PRECISION=precision,
            BLOCK_K=launch.block_k, **launch.constants(),
        )  # fmt: skip
    _weighted_sum[(tokens, triton.cdiv(hidden, _COLUMNS))](
        y, ids, weights, shared, shared_gate, out, hidden, w.first, experts, TOP_K=top_k, BLOCK=_COLUMNS, num_warps=4
    )
    return out


def _operands(w: Codes, x: Tensor | QuantisedRows) -> tuple[Tensor | None, ...]:
    """x, its scales, and the weight's codes, scales and zero points."""
    if isinstance(x, QuantisedRows):
        return x.codes, x.scales, w.codes.view(x.codes.dtype), w.scales, w.zeros
    return x, None, w.codes, w.scales, w.zeros


def _bytes_and_scales(rows: Tensor | QuantisedRows) -> tuple[Tensor, Tensor | None]:
    return (rows, None) if isinstance(rows, Tensor) else (rows.codes.view(torch.uint8), rows.scales)


def _constants(w: Codes, tile: GroupedLaunch, gpu: GpuProperties) -> dict[str, int]:
    of_weight = dict(KIND=int(w.kind), GROUP=w.group, HALF=w.step)
    return dict(CONVERT=gpu.convert, BLOCK_K=tile.block_k, **of_weight, **tile.constants())


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
    """(row, has_row, pair): the sorted rows of the program's tile, whether each belongs to `expert`, and its pair,
    token * TOP_K + choice."""
    row = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    has_row = row < tl.load(ends + expert)
    return row, has_row, tl.load(order + row, has_row, other=0).to(tl.int64)


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == 2:
        # A NaN stays NaN, as in torch.clamp.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        u = alpha * gate
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
    elif ACTIVATION == 1:
        u = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    else:
        u = gate
    return gate / (1.0 + tl.exp(-u)) * up


@triton.jit(do_not_specialize=["tokens", "pairs"])
def _quantised_gate_up(
    x, x_scales, codes, scales, zeros, bias, gated, gated_scales, order, tiles, ends, tokens, pairs, hidden, width,
    features, row_bytes, alpha, limit, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, KIND: tl.constexpr,
    CONVERT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, TO_KIND: tl.constexpr, TO_GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As _gate_up, with codes: the gates' products, then the ups'. `features`: rows of the stacked weight. ELEMENT: the
    model's dtype. If `gated_scales` is given, gated is written as codes."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    token = pair // TOP_K
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = n < width
    gates = expert * 2 * width + n
    gate = _multiply_either(
        x, x_scales, codes, scales, zeros, token, gates, has_row, has_n, tokens, features, hidden, row_bytes,
        KIND, CONVERT, GROUP, HALF, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    up = _multiply_either(
        x, x_scales, codes, scales, zeros, token, gates + width, has_row, has_n, tokens, features, hidden, row_bytes,
        KIND, CONVERT, GROUP, HALF, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    if bias is not None:
        gate += tl.load(bias + gates, has_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + gates + width, has_n, other=0.0).to(tl.float32)[:, None]
    result = _activated(gate, up, alpha, limit, ACTIVATION).to(ELEMENT)
    mask = has_row[None, :] & has_n[:, None]
    if gated_scales is not None:
        by_group = tl.reshape(result.to(tl.float32), [BLOCK_N // TO_GROUP, TO_GROUP, BLOCK_M])
        scale, inverse = _scale_of_row(_largest_magnitude(by_group, 1), TO_KIND)
        at = tl.program_id(1) * (BLOCK_N // TO_GROUP) + tl.arange(0, BLOCK_N // TO_GROUP)
        to_scale = gated_scales + at.to(tl.int64)[:, None] * pairs + row[None, :]
        tl.store(to_scale, scale, (at * TO_GROUP < width)[:, None] & has_row[None, :])
        result = tl.reshape(_quantised(by_group, inverse[:, None, :], TO_KIND), [BLOCK_N, BLOCK_M])
    tl.store(gated + row.to(tl.int64)[None, :] * width + n[:, None], result, mask)


@triton.jit
def _multiply_either(
    x, x_scales, codes, scales, zeros, m, n, has_m, has_n, rows, features, depth, row_bytes,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: rows n of the weight times rows m of x. If x has scales, it is codes.

    `rows`: the rows of the whole x. GROUP: columns of a group of the weight, and of x if it is codes; 0: a whole row.
    HALF: `Codes.step`.
    """
    if x_scales is None:
        return _multiply(
            x, codes, scales, zeros, None, m, n, has_m, has_n, features, depth, row_bytes, 0, depth, KIND, CONVERT,
            GROUP, HALF, BLOCK_K, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    else:
        return _multiply_codes(
            x, x_scales, codes, scales, m, n, has_m, has_n, rows, features, depth, row_bytes, GROUP, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _quantised_down(
    gated, gated_scales, codes, scales, zeros, bias, y, order, tiles, ends, pairs, width, hidden, features, row_bytes,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As _down, with a weight of codes. If gated has scales, it is codes too."""
    expert = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    row, has_row, pair = _rows_of_tile(order, tiles, ends, expert, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = n < hidden
    of_expert = expert * hidden + n
    sums = _multiply_either(
        gated, gated_scales, codes, scales, zeros, row, of_expert, has_row, has_n, pairs, features, width, row_bytes,
        KIND, CONVERT, GROUP, HALF, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
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
    """One program computes one tile of `y` [pairs, hidden]."""
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
