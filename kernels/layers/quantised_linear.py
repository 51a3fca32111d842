"""y = x @ weight^T + bias in Triton, over the codes of a QuantisedWeight.

    weight[n, k] = cast((codes[n, k] - zeros[n, g]) * scales[n, g]),  g = k // group      cast: to the dtype of x

A program reads a tile of codes, computes the tile's weights in registers, in float32, rounds them to the dtype of x and
multiplies them with a tile of x. So the products are those of the dequantised weight. The weights are the left operand,
because matrix units that can read an operand from registers can read the left one.

Codes of 4 bits are stored for this kernel in runs of 2 * `step` columns: byte j of a run has column j in its lower half
and column `step` + j in its upper half, so that each half is multiplied with consecutive columns of x. Integers have 8
added. Scales and zero points are transposed, [groups, features]. With `order`, column k of the codes is multiplied with
column order[k] of x.

Shapes: x [rows, depth] contiguous, y [rows, features], bias [features] or None. `pick_launch` picks higher tiles for
more rows. With `batch_invariant` all tiles have one height, because the order of a sum may depend on it.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.kv.quantise import FP8, INT8, _nibbles, _widened
from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight, unpack_halves

_FEW, _MEDIUM = 16, 64  # the heights of tiles for at most this many rows
_STEPS = (64, 32, 16)  # columns of a product
_UNPACKED_ROWS = 1 << 14  # rows unpacked at a time by pack_codes: the experts of a layer have millions of rows
# These numbers of rows lead to every tile that is picked, here and in w8a8_linear.py.
WARM_UP_ROWS = (1, _FEW + 1, _MEDIUM + 1)


class LinearLaunch(NamedTuple):
    """A tile: `block_m` rows of x by `block_n` features."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Codes(NamedTuple):
    """A weight as the kernel reads it.

    `step`: columns of a product; all lie in one group. `group`: columns of a group. `format`: how the activations that
    it is multiplied with are quantised; None: they are not.
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
        layout = self.kind, self.shape, self.step, self.group, self.scales.dtype, self.zeros is None, self.order is None
        return *layout, self.format


def pick_step(weight: QuantisedWeight) -> int | None:
    """The number of columns of a product; None if no step divides the weight's groups."""
    return next((step for step in _STEPS if weight.groups == 1 or weight.group % step == 0), None)


def pick_launch(
    rows: int, features: int, step: int, element_size: int, gpu: GpuProperties, *, batch_invariant: bool = False
) -> LinearLaunch:
    """The tile for x [rows, *]. Few rows take narrow tiles if wide ones would leave multiprocessors without work."""
    if rows <= _FEW and not batch_invariant:
        block_m, block_n, num_warps = _FEW, 64 if features >= 64 * gpu.processors else 32, 4
    elif rows <= _MEDIUM or batch_invariant or element_size == 4:
        block_m, block_n, num_warps = _MEDIUM if element_size == 2 else 32, 64, 4
    else:
        block_m, block_n, num_warps = 128, 128, 8
    # A stage holds the codes and x of two products. In addition, the weights of one product pass through shared memory.
    stage = 2 * step * (block_n + block_m * element_size)
    left = gpu.shared - step * block_n * element_size
    return LinearLaunch(block_m, block_n, num_warps, max(1, min(gpu.max_stages, 4, left // stage)))


def pack_codes(weight: QuantisedWeight, format: RowFormat | None = None) -> Codes:
    """`weight` must have a step (`pick_step`). `format`: the one of choose_format of w8a8_linear.py."""
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
    return Codes(
        weight.kind, weight.shape, step, weight.group, codes.contiguous(), weight.scales.T.contiguous(), zeros, order,
        format,
    )  # fmt: skip


def quantised_linear(w: Codes, x: Tensor, bias: Tensor | None, *, batch_invariant: bool) -> Tensor:
    """x [rows, depth] -> y [rows, features]. The caller has checked the arguments."""
    rows, (features, depth) = x.shape[0], w.shape
    y = x.new_empty((rows, features))
    if rows == 0:
        return y
    gpu = gpu_properties(x.device)
    launch = pick_launch(rows, features, w.step, x.element_size(), gpu, batch_invariant=batch_invariant)
    _quantised_linear[(triton.cdiv(rows, launch.block_m), triton.cdiv(features, launch.block_n))](
        x, w.codes, w.scales, w.zeros, w.order, bias, y, rows, features, depth, w.codes.shape[1], w.group,
        KIND=int(w.kind), CONVERT=gpu.convert, STEP=w.step, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _quantised_linear(
    x, codes, scales, zeros, order, bias, y, rows, features, depth, row_bytes, group,
    KIND: tl.constexpr, CONVERT: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_m, has_n = m < rows, n < features
    sums = _multiply(
        x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, group,
        KIND, CONVERT, STEP, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + n, has_n, other=0.0).to(tl.float32)[:, None]
    to = y + m.to(tl.int64)[None, :] * features + n[:, None]
    tl.store(to, sums.to(y.dtype.element_ty), has_n[:, None] & has_m[None, :])


@triton.jit
def _multiply(
    x, codes, scales, zeros, order, m, n, has_m, has_n, features, depth, row_bytes, group,
    KIND: tl.constexpr, CONVERT: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: rows n of the weight times rows m of x. `features`: rows of the whole weight."""
    at_code = codes + n.to(tl.int64)[:, None] * row_bytes + tl.arange(0, STEP)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if KIND == 2 or KIND == 4:
        for start in range(0, depth, 2 * STEP):
            packed = tl.load(at_code + start // 2, has_n[:, None], other=0)
            low, high = _halves_as_numbers(packed, KIND, CONVERT)
            sums = _add_columns(
                sums, low, start, x, scales, zeros, order, m, n, has_m, has_n, features, depth, group, STEP, PRECISION
            )
            sums = _add_columns(
                sums, high, start + STEP, x, scales, zeros, order, m, n, has_m, has_n, features, depth, group, STEP,
                PRECISION,
            )  # fmt: skip
    else:
        for start in range(0, depth, STEP):
            packed = tl.load(at_code + start, has_n[:, None], other=0)
            numbers = _widened(packed, FP8 if KIND == 3 else INT8, CONVERT, tl.float32, True)
            sums = _add_columns(
                sums, numbers, start, x, scales, zeros, order, m, n, has_m, has_n, features, depth, group, STEP,
                PRECISION,
            )  # fmt: skip
    return sums


@triton.jit
def _add_columns(
    sums, numbers, start, x, scales, zeros, order, m, n, has_m, has_n, features, depth, group,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` [BLOCK_N, BLOCK_M] plus the products of STEP columns from `start` on, which all lie in one group.

    `numbers` [BLOCK_N, STEP]: the codes as float32. Columns past the end are multiplied with zeros.
    """
    # If all columns are past the end, the last group stands in: they have none of their own.
    of_group = (tl.minimum(start, depth - 1) // group).to(tl.int64) * features + n
    if zeros is not None:
        numbers -= tl.load(zeros + of_group, has_n, other=0).to(tl.float32)[:, None]
    weight = numbers * _scale(tl.load(scales + of_group, has_n, other=0))[:, None]
    k = start + tl.arange(0, STEP)
    has_k = k < depth
    column = k
    if order is not None:
        column = tl.load(order + k, has_k, other=0)
    from_x = x + m.to(tl.int64)[None, :] * depth + column[:, None]
    part = tl.load(from_x, has_k[:, None] & has_m[None, :], other=0.0)
    return tl.dot(weight.to(part.dtype), part, sums, input_precision=PRECISION)


@triton.jit
def _scale(scale):
    """float32 of a scale. A byte e stands for 2^(e - 127) (E8M0). 2^-127 is subnormal: bit 22 alone is set."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32) << 23
        return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _halves_as_numbers(packed, KIND: tl.constexpr, CONVERT: tl.constexpr):
    """float32 of the lower and upper halves of bytes. The bits of an E2M1, moved into a float32, are 2^-126 times its
    value."""
    if KIND == 2:
        low, high = _nibbles(packed, CONVERT, tl.float32, True)
    else:
        bits = packed.to(tl.uint32)
        low = _e2m1(bits & 15)
        high = _e2m1(bits >> 4)
    return low, high


@triton.jit
def _e2m1(bits):
    moved = ((bits & 8) << 28) | ((bits & 7) << 22)
    return moved.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
