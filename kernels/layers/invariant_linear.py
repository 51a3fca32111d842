"""y = x @ weight^T + bias in Triton, where the bits of a row of y do not depend on the number or order of the rows.

`--deterministic` needs it, because libraries choose the order of a sum by the number of rows. Here the shape of the
weight and the GPU fix the order:

    sums[u]  = the sum over the columns of unit u, `BLOCK_K` columns at a time, in float32 (split-K)
    y        = ((sums[0] + sums[1]) + sums[2]) + ... + bias,    rounded once

All tiles have one height and one width, so a row takes the same instructions whatever the other rows of its tile are.
With many rows a program computes all units of its tile. Few rows make too few tiles to fill the GPU: then each program
computes one unit of a tile, and `_add_units` adds the units' sums, in the same order. `units_of` divides the columns
into as many units as fill the GPU when x has one tile of rows.

The programs are persistent, as in Triton's tutorial on matrix products: n programs run at the same time, and each
computes every n-th tile. Tiles that run at the same time share rows of x and of the weight in the L2 cache.

Shapes: weight [features, depth], bias [features] or None, x [rows, depth] contiguous, y [rows, features]. Or one linear
for each head: weight [heads, features, depth], x [rows, heads, depth] and out [rows, heads, features], any strides over
rows and heads. The last dimensions of x and out have stride 1; the weight may have any strides.
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

_LEAST_UNIT = 512  # columns; shorter units would write more sums than they read of the weight
_SPLIT_ROWS = 512  # with more rows, one program computes all units of a tile; this bounds the memory of the sums
_PROGRAMS = 2  # programs per multiprocessor
_GROUP: tl.constexpr = tl.constexpr(8)  # tiles of one column that are computed before the next column of tiles
_ADDED = 1024  # elements that a program of `_add_units` adds


class InvariantLaunch(NamedTuple):
    """A tile: `block_m` rows of x by `block_n` features, `block_k` columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def pick_launch(element_size: int, gpu: GpuProperties) -> InvariantLaunch:
    """The one tile for a dtype. With 64 rows a decode step is still bound by reading the weights, so that its empty
    rows cost no time."""
    block_m, block_n, block_k = (64, 128, 64) if element_size == 2 else (32, 64, 32)
    stage = (block_m + block_n) * block_k * element_size
    return InvariantLaunch(block_m, block_n, block_k, 4, min(gpu.max_stages, 4, gpu.shared // stage))


def units_of(heads: int, features: int, depth: int, launch: InvariantLaunch, gpu: GpuProperties) -> tuple[int, int]:
    """(number of units, columns of a unit). They must not depend on the number of rows."""
    tiles = heads * triton.cdiv(features, launch.block_n)
    units = max(1, min(gpu.processors // tiles, depth // _LEAST_UNIT))
    columns = triton.cdiv(triton.cdiv(depth, units), launch.block_k) * launch.block_k
    return triton.cdiv(depth, columns), columns


def is_split(rows: int, heads: int, features: int, units: int, launch: InvariantLaunch, gpu: GpuProperties) -> bool:
    """Whether the units of a tile are computed by separate programs. The bits are the same either way."""
    tiles = heads * triton.cdiv(features, launch.block_n) * triton.cdiv(rows, launch.block_m)
    return units > 1 and rows <= _SPLIT_ROWS and tiles < gpu.processors


def warm_up_rows(weight: Tensor) -> tuple[int, ...]:
    """Numbers of rows that together launch every variant of the kernels that a weight [features, depth] takes."""
    gpu = gpu_properties(weight.device)
    features, depth = weight.shape
    units, _ = units_of(1, features, depth, pick_launch(weight.element_size(), gpu), gpu)
    return (1, _SPLIT_ROWS + 1) if units > 1 else (1,)


def invariant_linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, depth], contiguous -> y [rows, features]. The caller has checked the arguments."""
    y = x.new_empty((x.shape[0], weight.shape[0]))
    # Not x.stride(0): with one row it may be any number, and Triton would compile another variant for some of them.
    _launch(weight[None], x, bias, y, rows=len(x), x_strides=(x.shape[1], 0), y_strides=(len(weight), 0))
    return y


def invariant_heads_linear(weight: Tensor, x: Tensor, out: Tensor) -> None:
    """Write `out` [rows, heads, features]. The caller has checked the arguments."""
    x_strides, y_strides = (x.stride(0), x.stride(1)), (out.stride(0), out.stride(1))
    _launch(weight, x, None, out, rows=len(x), x_strides=x_strides, y_strides=y_strides)


def _launch(
    weight: Tensor, x: Tensor, bias: Tensor | None, y: Tensor, *, rows: int, x_strides: tuple[int, int],
    y_strides: tuple[int, int],
) -> None:  # fmt: skip
    """`x_strides` and `y_strides`: the strides over rows and over heads."""
    heads, features, depth = weight.shape
    if rows == 0:
        return
    gpu = gpu_properties(x.device)
    launch = pick_launch(x.element_size(), gpu)
    units, columns = units_of(heads, features, depth, launch, gpu)
    split = is_split(rows, heads, features, units, launch, gpu)
    sums = torch.empty((units, rows, heads * features), dtype=torch.float32, device=x.device) if split else y
    tiles = heads * triton.cdiv(features, launch.block_n) * triton.cdiv(rows, launch.block_m)
    items = tiles * (units if split else 1)
    programs = min(items, _PROGRAMS * gpu.processors)
    _invariant_linear[(programs,)](
        x, weight, None if split else bias, sums, rows, heads, features, depth, columns, items, programs,
        *x_strides, *weight.stride(), *((heads * features, features) if split else y_strides),
        SPLIT=split, EVEN=depth % launch.block_k == 0, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if split:
        _add_units[(rows, triton.cdiv(heads * features, _ADDED))](
            sums, bias, y, rows, units, heads, features, *y_strides, BLOCK=_ADDED, num_warps=4
        )


@triton.jit(do_not_specialize=["rows", "heads", "items", "programs"])
def _invariant_linear(
    x, weight, bias, y, rows, heads, features, depth, columns, items, programs, x_row, x_head, w_head, w_feature,
    w_column, y_row, y_head, SPLIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program p computes the items p, p + programs, ... An item is a tile of y; with SPLIT it is one unit of a tile.

    `columns`: columns of a unit. `y`: with SPLIT the sums [units, rows, heads * features]. EVEN: BLOCK_K divides
    `depth`.
    """
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    tiles = down * across
    for item in range(tl.program_id(0), items, programs):
        tile, head, unit = item % tiles, item // tiles % heads, item // tiles // heads
        top = tile // (_GROUP * across) * _GROUP
        height = tl.minimum(down - top, _GROUP)
        inside = tile % (_GROUP * across)
        m = (top + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
        has_m, has_n = m < rows, n < features
        from_x = x + m.to(tl.int64) * x_row + head.to(tl.int64) * x_head
        from_weight = weight + n.to(tl.int64) * w_feature + head.to(tl.int64) * w_head
        to = y + m.to(tl.int64)[:, None] * y_row + head.to(tl.int64) * y_head + n[None, :]
        if SPLIT:
            sums = _sum_unit(
                from_x, from_weight, unit * columns, columns, depth, w_column, has_m, has_n,
                EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            to += unit * rows * y_row
        else:
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first in range(0, depth, columns):
                sums += _sum_unit(
                    from_x, from_weight, first, columns, depth, w_column, has_m, has_n,
                    EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
                )  # fmt: skip
            if bias is not None:
                sums += tl.load(bias + n, has_n, other=0.0).to(tl.float32)[None, :]
        tl.store(to, sums.to(y.dtype.element_ty), has_m[:, None] & has_n[None, :])


@triton.jit
def _sum_unit(
    from_x, from_weight, first, columns, depth, w_column, has_m, has_n,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: the sum over the unit that begins at column `first`."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, tl.minimum(first + columns, depth), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_x, is_weight = has_m[:, None], has_n[None, :]
        if not EVEN:
            is_x, is_weight = is_x & (k < depth)[None, :], is_weight & (k < depth)[:, None]
        a = tl.load(from_x[:, None] + k[None, :], is_x, other=0.0)
        b = tl.load(from_weight[None, :] + k.to(tl.int64)[:, None] * w_column, is_weight, other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["rows", "units", "heads"])
def _add_units(sums, bias, y, rows, units, heads, features, y_row, y_head, BLOCK: tl.constexpr):
    """One program adds the units of BLOCK elements of one row, in the order of `_invariant_linear`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = heads * features
    has = at < width
    from_sums = sums + row * width + at
    total = tl.zeros([BLOCK], tl.float32)
    for unit in range(units):
        total += tl.load(from_sums + unit * rows * width, has, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % features, has, other=0.0).to(tl.float32)
    tl.store(y + row * y_row + at // features * y_head + at % features, total.to(y.dtype.element_ty), has)
