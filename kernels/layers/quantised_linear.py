"""y = x @ weight^T + bias in Triton, over the codes of a QuantisedWeight.

    weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g],  g = k // group

A program reads a tile of codes, converts it to the dtype of x in registers, which is exact, and multiplies it with a
tile of x. The scale of a group multiplies the sums of the group's columns. Where groups are short, tiles are high, or
zero points may be fractions, it multiplies the codes before the product, and they are rounded to the dtype of x. The
weight is the left operand, because matrix units that read an operand from registers read the left one. Scales are
loaded one step ahead.

Few rows make too few tiles to fill the GPU. Then the columns are divided into units (split-K): each program sums one
unit of a tile, and the program that finishes last adds the sums of all units, in the order of the columns. So the bits
do not depend on which program is last. linear.py multiplies more than MANY rows by a library, with the weight that
`dequantise_rows` writes. With `batch_invariant` this kernel multiplies any number of rows. Then all tiles have one
height, because the order of a sum may depend on it, the units do not depend on the number of rows, and beyond
_SPLIT_ROWS rows one program sums all units of its tile.

Codes of 4 bits are stored for this kernel in runs of 2 * `step` columns: byte j of a run has column j in its lower half
and column `step` + j in its upper half, so that each half is multiplied with consecutive columns of x. Integers have 8
added. Scales and zero points are transposed, [groups, features]. With `order`, column k of the codes is multiplied with
column order[k] of x. Shapes: x [rows, depth] contiguous, y [rows, features], bias [features] or None.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.kv.quantise import FP8, INT8, _e2m1_halves, _nibbles, _scale, _scaled, _widened
from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight, unpack_halves

_FEW, _MEDIUM, _HIGH = 16, 64, 128  # the heights of tiles
MANY = 256  # more rows are multiplied by a library
_SPLIT_ROWS = 256  # with more rows, one program computes all units of a tile; this bounds the memory of the sums
_DEQUANTISED_ROWS = 32  # of a program
_LEAST_UNIT = 512  # columns; shorter units would write more sums than they read of the weight
_UNIT_STEP = 256  # a unit has a multiple of this many columns; every STEP and 2 * HALF of the kernel divides it
_MOST_TILES = 1 << 16  # the most tiles of a launch that are divided into units
_STEPS, _LEAST_GROUP = (128, 64, 32, 16), 16  # columns
_UNPACKED_ROWS = 1 << 14  # rows unpacked at a time by pack_codes: the experts of a layer have millions of rows
# Calls with these numbers of rows launch every variant of the kernels, here and in w8a8_linear.py.
WARM_UP_ROWS = (1, _FEW + 1, _MEDIUM + 1, _HIGH + 1, MANY + 1)


class LinearLaunch(NamedTuple):
    """A tile: `block_m` rows of x by `block_n` features."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Codes(NamedTuple):
    """A weight as the kernel reads it.

    `step`: the distance between the columns of the two 4-bit codes of a byte. It divides `group` or is a multiple of
    it, and the bytes of a row are padded to a multiple of it. `group`: columns of a group; 0: the whole row. `format`:
    how the activations are quantised that the weight is multiplied with; None: they are not.
    """

    kind: CodeKind
    shape: tuple[int, int]
    step: int
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    format: RowFormat | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(part for part in (self.codes, self.scales, self.zeros, self.order) if part is not None)

    @property
    def variant(self) -> tuple[object, ...]:
        """Equal for weights that share their kernels."""
        zeros = None if self.zeros is None else self.zeros.dtype
        layout = self.kind, self.shape, self.step, self.group, self.scales.dtype, zeros, self.order is None
        return *layout, self.format


def pick_step(weight: QuantisedWeight) -> int | None:
    """`Codes.step`; None if no step fits the weight's groups."""
    return step_of(weight.kind, weight.shape[1], 0 if weight.groups == 1 else weight.group, weight.dtype.itemsize)


def step_of(kind: CodeKind, columns: int, group: int, element_size: int) -> int | None:
    """`pick_step` of a weight whose groups have `group` columns. `element_size`: of x."""
    most = 128 if element_size == 2 and columns % (1024 // kind.bits) == 0 else 64  # rows are padded to whole steps
    if group == 0:
        return most
    steps = (step for step in _STEPS if step <= most)
    return next((step for step in steps if group % step == 0 or (step % group == 0 and group >= _LEAST_GROUP)), None)


def pick_launch(
    rows: int, w: Codes, element_size: int, gpu: GpuProperties, *, batch_invariant: bool = False
) -> tuple[LinearLaunch, int]:
    """(tile for x [rows, depth], columns that one product of the kernel sums: its STEP)."""
    packed, step = w.kind.bits == 4, w.step
    if rows <= _FEW and not batch_invariant:
        block_m, block_n, num_warps, stages = _FEW, 64, 4, 3 if packed else 4
        if not packed and step == 128 and w.group % 256 == 0 and w.codes.shape[1] % 256 == 0:
            block_n, step = 32, 256
    elif rows <= _MEDIUM or batch_invariant or element_size == 4:
        block_m, block_n, num_warps, stages = _MEDIUM if element_size == 2 else 32, 64, 4, 3 if packed else 4
    else:
        block_m, block_n, num_warps, stages, step = _HIGH, 128, 8, 4, min(step, 64)
    if w.order is not None or (batch_invariant and w.zeros is not None and w.zeros.is_floating_point()):
        step = min(step, 64)  # the addresses of x, or the zero points of several groups, take registers
    if packed and gpu.convert and not gpu.wide_tiles and block_m > _FEW and element_size == 2:  # and sums of mma.sync
        is_tight = w.order is not None or batch_invariant or (block_m == _HIGH and w.kind is CodeKind.FP4)
        step = min(step, 32 if is_tight else 64)
        stages = 2 if batch_invariant and gpu.convert == 3 else stages  # 3 would spill on sm_89
    # A stage holds codes and x. Beside the stages, the converted codes of one product may pass through shared memory.
    stage = step * (block_n + (2 if packed else 1) * block_m * element_size)
    left = gpu.shared - step * block_n * element_size
    while step > 64 and 2 * stage > left:
        step, stage, left = step // 2, stage // 2, gpu.shared - step // 2 * block_n * element_size
    return LinearLaunch(block_m, block_n, num_warps, max(1, min(gpu.max_stages, stages, left // stage))), step


def units_of(
    rows: int, w: Codes, launch: LinearLaunch, gpu: GpuProperties, *, batch_invariant: bool = False
) -> tuple[int, int]:
    """(number of units, columns of a unit), as many units as fill the GPU. With `batch_invariant` they do not depend on
    the number of rows."""
    features, depth = w.shape
    tiles = triton.cdiv(features, launch.block_n) * (1 if batch_invariant else triton.cdiv(rows, launch.block_m))
    # The programs that run at once: 4, 2 or 1 on a multiprocessor, by their registers and shared memory.
    places = gpu.processors * (4 if launch.block_m == _FEW else 1 if launch.block_m == _HIGH else 2)
    units = places // tiles
    if units == 1 and launch.block_m == _FEW:
        units = 2  # shorter programs leave multiprocessors idle for less time at the end
    units = max(1, min(units, depth // _LEAST_UNIT))
    columns = triton.cdiv(triton.cdiv(depth, units), _UNIT_STEP) * _UNIT_STEP
    return triton.cdiv(depth, columns), columns


def pack_codes(weight: QuantisedWeight, format: RowFormat | None = None) -> Codes:
    """`weight` must have a step (`pick_step`). `format`: what choose_format of w8a8_linear.py chose."""
    step = pick_step(weight)
    assert step is not None, "a weight without a step is dequantised"
    columns = weight.shape[1]
    if weight.kind.bits == 8:
        codes = F.pad(weight.codes, (0, -columns % step))
    else:
        codes = weight.codes.new_empty((weight.shape[0], -(-columns // (2 * step)) * step))
        for rows, to in zip(weight.codes.split(_UNPACKED_ROWS), codes.split(_UNPACKED_ROWS), strict=True):
            halves = unpack_halves(rows)[:, :columns].to(torch.uint8)
            if weight.kind is CodeKind.INT4:
                halves ^= 8
            runs = F.pad(halves, (0, -columns % (2 * step))).unflatten(1, (-1, 2, step))
            to.copy_((runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1))
    zeros = None if weight.zeros is None else weight.zeros.T.contiguous()
    order = None if weight.order is None else weight.order.int().contiguous()
    group = 0 if weight.groups == 1 else weight.group
    return Codes(
        weight.kind, weight.shape, step, group, codes.contiguous(), weight.scales.T.contiguous(), zeros, order, format
    )


def quantised_linear(w: Codes, x: Tensor, bias: Tensor | None, *, batch_invariant: bool) -> Tensor:
    """x [rows, depth] -> y [rows, features]. The caller has checked the arguments."""
    rows, (features, depth) = x.shape[0], w.shape
    y = x.new_empty((rows, features))
    if rows == 0:
        return y
    gpu = gpu_properties(x.device)
    launch, step = pick_launch(rows, w, x.element_size(), gpu, batch_invariant=batch_invariant)
    units, columns = units_of(rows, w, launch, gpu, batch_invariant=batch_invariant)
    down, across = triton.cdiv(rows, launch.block_m), triton.cdiv(features, launch.block_n)
    split = units > 1 and rows <= _SPLIT_ROWS
    sums = torch.empty((units, rows, features), dtype=torch.float32, device=x.device) if split else None
    _quantised_linear[(down, across, units if split else 1)](
        x, w.codes, w.scales, w.zeros, w.order, bias, y, sums, _counters(x.device) if split else None, rows, features,
        depth, w.codes.shape[1], columns, KIND=int(w.kind), CONVERT=gpu.convert, GROUP=w.group, HALF=w.step, STEP=step,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WHOLE=units == 1, num_warps=launch.num_warps, num_stages=launch.num_stages,
        enable_fp_fusion=w.group > 0 or not batch_invariant or x.dtype == torch.float32,  # see the end of _multiply
    )  # fmt: skip
    return y


@cache
def _counters(device: torch.device) -> Tensor:
    """For each tile the number of programs that have stored their sums. A launch leaves zeros. All launches of a device
    share the counters, so no two may run at once: the streams that launch them must wait for one another."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def dequantise_rows(w: Codes, first: int, out: Tensor) -> Tensor:
    """Write rows [`first`, `first` + rows) of the weight into `out` [rows, depth], columns ordered as in the codes."""
    rows, depth = out.shape
    gpu = gpu_properties(out.device)
    _dequantise[(triton.cdiv(w.codes.shape[1], w.step), triton.cdiv(rows, _DEQUANTISED_ROWS))](
        w.codes, w.scales, w.zeros, out, first, rows, w.shape[0], depth, w.codes.shape[1], KIND=int(w.kind),
        CONVERT=gpu.convert, GROUP=w.group, STEP=w.step, BLOCK_N=_DEQUANTISED_ROWS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _quantised_linear(
    x, codes, scales, zeros, order, bias, y, sums, counters, rows, features, depth, row_bytes, columns,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y, or with `sums` [units, rows, features] one unit of a tile. `columns`: of a
    unit. WHOLE: there is one unit."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_m, has_n = m < rows, n < features
    mask = has_n[:, None] & has_m[None, :]
    at = m.to(tl.int64)[None, :] * features + n[:, None]
    if WHOLE:
        total = _multiply(
            x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, 0, depth,
            KIND, CONVERT, GROUP, HALF, STEP, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    elif sums is None:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, depth, columns):
            total += _multiply(
                x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, first,
                tl.minimum(first + columns, depth), KIND, CONVERT, GROUP, HALF, STEP, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    else:
        first = tl.program_id(2) * columns
        part = _multiply(
            x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, first,
            tl.minimum(first + columns, depth), KIND, CONVERT, GROUP, HALF, STEP, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        size = rows.to(tl.int64) * features
        tl.store(sums + tl.program_id(2) * size + at, part, mask)
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        # All threads store before one of them counts the program. The count is an atomic that acquires and releases at
        # the scope of the GPU, so the program that counts last sees all sums. It loads them from L2 (.cg).
        tl.debug_barrier()
        units = tl.num_programs(2)
        if tl.atomic_add(counter, 1) != units - 1:
            return
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for unit in range(units):
            total += tl.load(sums + unit * size + at, mask, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    if bias is not None:
        total += tl.load(bias + n, has_n, other=0.0).to(tl.float32)[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask)


@triton.jit
def _multiply(
    x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, first, end,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: columns [first, end) of rows n of the weight times rows m of x. `features`: rows of
    the whole weight. `first` is a multiple of 2 * HALF."""
    dtype: tl.constexpr = x.dtype.element_ty
    packed: tl.constexpr = KIND == 2 or KIND == 4
    # Whether codes less zero points are exact in the dtype of x.
    are_exact: tl.constexpr = dtype != tl.float32 and (zeros is None or zeros.dtype.element_ty == tl.int8)
    # Whether scales multiply sums, not codes: the sums of each product, or with GROUP 0 the sums of all columns once.
    of_sums: tl.constexpr = are_exact and (GROUP == 0 or (GROUP % STEP == 0 and BLOCK_M <= 64))
    # Whether the two codes of a byte may lie in different groups.
    two: tl.constexpr = packed and GROUP > 0 and GROUP % (2 * HALF) != 0
    at_code = codes + n.to(tl.int64)[:, None] * row_bytes + tl.arange(0, STEP)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale, zero = _of_group(scales, zeros, first, n, has_n, features, depth, GROUP, STEP)
    high_scale, high_zero = scale, zero
    if two:
        high_scale, high_zero = _of_group(scales, zeros, first + HALF, n, has_n, features, depth, GROUP, STEP)
    for byte in range(first // 2 if packed else first, tl.cdiv(end, 2 * HALF) * HALF if packed else end, STEP):
        code = tl.load(at_code + byte, has_n[:, None], other=0)
        start = byte + byte // HALF * HALF if packed else byte
        following = byte + STEP + (byte + STEP) // HALF * HALF if packed else byte + STEP
        next_scale, next_zero = scale, zero
        if GROUP > 0:
            next_scale, next_zero = _of_group(scales, zeros, following, n, has_n, features, depth, GROUP, STEP)
        next_high_scale, next_high_zero = next_scale, next_zero
        if two:
            next_high_scale, next_high_zero = _of_group(
                scales, zeros, following + HALF, n, has_n, features, depth, GROUP, STEP
            )
        part = _part(x, order, m, has_m, start, depth, STEP)
        if packed:
            low, high = _halves(code, KIND, CONVERT, dtype)
            sums = _add(sums, low, part, scale, zeros, zero, GROUP, CONVERT, PRECISION, of_sums)
            part = _part(x, order, m, has_m, start + HALF, depth, STEP)
            sums = _add(sums, high, part, high_scale, zeros, high_zero, GROUP, CONVERT, PRECISION, of_sums)
        else:
            numbers = _widened(code, FP8 if KIND == 3 else INT8, CONVERT, dtype, True)
            sums = _add(sums, numbers, part, scale, zeros, zero, GROUP, CONVERT, PRECISION, of_sums)
        scale, zero, high_scale, high_zero = next_scale, next_zero, next_high_scale, next_high_zero
    if GROUP == 0 and of_sums:
        sums *= _scale(scale)[:, None]
    return sums


@triton.jit
def _add(
    sums, numbers, part, scale, zeros, zero, GROUP: tl.constexpr, CONVERT: tl.constexpr, PRECISION: tl.constexpr,
    OF_SUMS: tl.constexpr,
):  # fmt: skip
    """`sums` plus the product of `numbers` with `part`, a tile of x."""
    if not OF_SUMS:
        return tl.dot(_scaled(numbers, scale, zeros, zero, CONVERT), part, sums, input_precision=PRECISION)
    else:
        numbers = _subtract(numbers, zeros, zero)
        if GROUP == 0:
            return tl.dot(numbers, part, sums, input_precision=PRECISION)
        else:
            return sums + tl.dot(numbers, part, input_precision=PRECISION) * _scale(scale)[:, None]


@triton.jit
def _halves(code, KIND: tl.constexpr, CONVERT: tl.constexpr, dtype: tl.constexpr):
    if KIND == 2:
        return _nibbles(code, CONVERT, dtype, True)
    else:
        return _e2m1_halves(code, CONVERT, dtype, True)


@triton.jit
def _part(x, order, m, has_m, start, depth, STEP: tl.constexpr):
    """[STEP, BLOCK_M]: the columns from `start` on of rows m of x; zeros past the end."""
    k = start + tl.arange(0, STEP)
    has_k = k < depth
    column = k
    if order is not None:
        column = tl.load(order + k, has_k, other=0)
    return tl.load(x + m.to(tl.int64)[None, :] * depth + column[:, None], has_k[:, None] & has_m[None, :], other=0.0)


@triton.jit
def _of_group(scales, zeros, start, n, has_n, features, depth, GROUP: tl.constexpr, STEP: tl.constexpr):
    """The scales and zero points of the STEP columns from `start` on, as stored: [BLOCK_N], or if several groups share
    a step [BLOCK_N, groups]. Columns past the end get the last group's. Without zeros: the scales twice."""
    if GROUP == 0 or GROUP >= STEP:
        group = tl.minimum(start, depth - 1) // GROUP if GROUP > 0 else 0
        at = tl.cast(group, tl.int64) * features + n
        mask = has_n
    else:
        group = tl.minimum(start // GROUP + tl.arange(0, STEP // GROUP), (depth - 1) // GROUP)
        at = group.to(tl.int64)[None, :] * features + n[:, None]
        mask = has_n[:, None]
    scale = tl.load(scales + at, mask, other=0)
    zero = scale
    if zeros is not None:
        zero = tl.load(zeros + at, mask, other=0)
    return scale, zero


@triton.jit
def _subtract(numbers, zeros, zero):
    """`numbers` minus their zero points, if there are any: integers from -255 to 255, exact in bfloat16."""
    if zeros is not None:
        return (numbers.to(tl.float32) - zero.to(tl.float32)[:, None]).to(numbers.dtype)
    else:
        return numbers


@triton.jit(do_not_specialize=["first", "rows"])
def _dequantise(
    codes, scales, zeros, out, first, rows, features, depth, row_bytes,
    KIND: tl.constexpr, CONVERT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program writes the columns of STEP bytes of BLOCK_N rows. `rows`: of `out`. `features`: of the weight."""
    packed: tl.constexpr = KIND == 2 or KIND == 4
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n, has_n = first + row, row < rows
    byte = tl.program_id(0) * STEP + tl.arange(0, STEP)
    code = tl.load(codes + n.to(tl.int64)[:, None] * row_bytes + byte[None, :], has_n[:, None], other=0)
    start = tl.program_id(0) * (2 * STEP if packed else STEP)
    scale, zero = _of_group(scales, zeros, start, n, has_n, features, depth, GROUP, STEP)
    k = start + tl.arange(0, STEP)
    to = out + row.to(tl.int64)[:, None] * depth + k[None, :]
    if packed:
        low, high = _halves(code, KIND, CONVERT, dtype)
        tl.store(to, _scaled(low, scale, zeros, zero, CONVERT), has_n[:, None] & (k < depth)[None, :])
        scale, zero = _of_group(scales, zeros, start + STEP, n, has_n, features, depth, GROUP, STEP)
        tl.store(to + STEP, _scaled(high, scale, zeros, zero, CONVERT), has_n[:, None] & (k + STEP < depth)[None, :])
    else:
        number = _widened(code, FP8 if KIND == 3 else INT8, CONVERT, dtype, True)
        tl.store(to, _scaled(number, scale, zeros, zero, CONVERT), has_n[:, None] & (k < depth)[None, :])
