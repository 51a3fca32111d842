"""y = x @ weight^T + bias over codes of 8 bits on both sides (W8A8): FP8 (e4m3) with FP8, INT8 with INT8.

    y[m, n] = sum over g of x_scales[g, m] * scales[n, g] * sum over k in g of x[m, k] * codes[n, k]    + bias[n]

The matrix unit adds the products of one group, those of FP8 in float32, those of INT8 in int32. Groups are added in
float32. x and weight have the same groups: the whole row (scales per token and per output channel, or per tensor), or
`group` consecutive columns (DeepSeek's blocks of 128). y is rounded once to the dtype of the model.

`choose_format` says whether x is quantised for a weight. `choose_product` says what computes a call: Triton's kernel
here, or `torch._scaled_mm` (cuBLAS and CUTLASS).
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.kv.quantise import _scale
from coatcheck.kernels.layers.quantised_linear import _FEW, _MEDIUM, Codes, LinearLaunch
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, RowFormat, quantise_rows_reference
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight

_log = logging.getLogger(__name__)

_COLUMNS = 128  # the most columns of a product
_LEAST_GROUP = 32  # the fewest columns of a group: a product of 8-bit operands has at least this many
_STRIDE = 16  # torch._scaled_mm takes operands whose rows are a multiple of this many bytes
_PROBE = (32, 256, 128)  # rows, depth and features of the probe
_PROBE_ERROR = 0.05  # relative to the largest magnitude: bfloat16 rounds by 0.004


class FormatChoice(NamedTuple):
    """`format`: how x is quantised; None: x is not quantised, and `reason` says why."""

    format: RowFormat | None
    reason: str = ""


def choose_format(weight: QuantisedWeight, gpu: GpuProperties) -> FormatChoice:
    """How x is quantised for a weight whose checkpoint asks for quantised activations, or why it is not."""
    kind, group = weight.kind, 0 if weight.groups == 1 else weight.group
    if kind not in (CodeKind.FP8, CodeKind.INT8):
        return FormatChoice(None, f"weights of {kind.bits} bits have no product with activations of 8 bits")
    if kind is CodeKind.FP8 and not gpu.has_fp8_products:
        return FormatChoice(None, "FP8 products need an NVIDIA GPU of compute capability 8.9 or later")
    if kind is CodeKind.INT8 and not gpu.has_int8_products:
        return FormatChoice(None, "the kernels have no fast INT8 products for this GPU")
    if weight.zeros is not None or weight.order is not None:
        return FormatChoice(None, "the weights have zero points, or reordered columns (act-order)")
    if group and (group < _LEAST_GROUP or group & (group - 1)):
        return FormatChoice(None, f"groups of {group} columns, not a power of two of at least {_LEAST_GROUP}")
    return FormatChoice(RowFormat(kind, group))


def choose_product(
    rows: int, shape: tuple[int, int], format: RowFormat, dtype: torch.dtype, *, has_scaled_mm: bool,
    batch_invariant: bool = False,
) -> str:  # fmt: skip
    """`scaled_mm` or `triton`. `shape`: [features, depth] of the weight. With `batch_invariant` it is `triton`, because
    libraries choose tiles, and so the order of a sum, by the number of rows."""
    fits = (
        has_scaled_mm
        and not batch_invariant
        and rows > _FEW  # fewer rows are bound by reading the weight, and libraries compute tiles of 64 or 128 rows
        and format == (CodeKind.FP8, 0)
        and dtype == torch.bfloat16  # the only dtype of y that torch has with a scale for each row
        and not any(size % _STRIDE for size in shape)
    )
    return "scaled_mm" if fits else "triton"


@cache
def scaled_mm_refusal(device: torch.device) -> str:
    """Why torch._scaled_mm cannot be used on `device`; "" if it can. Runs one small product and checks its result."""
    if device.type != "cuda":
        return "only GPUs have it"
    rows, depth, features = _PROBE
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, depth, generator=generator, device="cpu").bfloat16() for count in (rows, features))
    format = RowFormat(CodeKind.FP8, 0)
    x_rows, w_rows = quantise_rows_reference(x, format), quantise_rows_reference(weight, format)
    exact = x_rows.dequantise() @ w_rows.dequantise().T
    try:
        x_codes, x_scales = (part.to(device) for part in x_rows[:2])
        codes, scales = (part.to(device) for part in w_rows[:2])
        y = scaled_mm(codes, scales, QuantisedRows(x_codes, x_scales, format, torch.bfloat16), None)
        error = float((y.float().cpu() - exact).abs().max() / exact.abs().max())
    except (RuntimeError, ValueError, TypeError) as refusal:
        reason = str(refusal).strip().splitlines()[0] if str(refusal).strip() else type(refusal).__name__
    else:
        if error <= _PROBE_ERROR:
            return ""
        reason = f"the error of a test product is {error:.2g} of its largest element"
    _log.warning("Triton's kernel replaces torch._scaled_mm on %s: %s", device, reason)
    return reason


def scaled_mm(codes: Tensor, scales: Tensor, x: QuantisedRows, bias: Tensor | None) -> Tensor:
    """x @ codes^T with its scales, by torch._scaled_mm: [rows, features] of x.dtype. codes: FP8 [features, depth].
    scales: float32 [1, features]."""
    y: Tensor = torch._scaled_mm(
        x.codes, codes.view(torch.float8_e4m3fn).t(), scale_a=x.scales.view(-1, 1), scale_b=scales, bias=bias,
        out_dtype=x.dtype,
    )  # fmt: skip
    return y


def pick_w8a8_launch(
    rows: int, features: int, group: int, gpu: GpuProperties, *, batch_invariant: bool = False
) -> tuple[LinearLaunch, int]:
    """(tile, columns of a product). `group`: columns of a group; 0: the whole row."""
    block_k = min(group or _COLUMNS, _COLUMNS)
    if rows <= _FEW and not batch_invariant:
        block_m, block_n, num_warps = _FEW, 64 if features >= 64 * gpu.processors else 32, 4
    elif rows <= _MEDIUM or batch_invariant:
        block_m, block_n, num_warps = _MEDIUM, 64, 4
    else:
        block_m, block_n, num_warps = 128, 128, 8
    stage = block_k * (block_n + block_m)
    return LinearLaunch(block_m, block_n, num_warps, max(1, min(gpu.max_stages, 4, gpu.shared // stage))), block_k


def multiply_rows(w: Codes, x: QuantisedRows, bias: Tensor | None, *, batch_invariant: bool) -> Tensor:
    """x [rows, depth] -> y [rows, features] of x.dtype. `w` has the format of x."""
    rows, device = x.shape[0], x.codes.device
    has_scaled_mm = w.format == (CodeKind.FP8, 0) and not scaled_mm_refusal(device)
    product = choose_product(
        rows, w.shape, x.format, x.dtype, has_scaled_mm=has_scaled_mm, batch_invariant=batch_invariant
    )
    if product == "scaled_mm":
        return scaled_mm(w.codes[:, : w.shape[1]], w.scales, x, bias)
    return w8a8_linear(w, x, bias, batch_invariant=batch_invariant)


def w8a8_linear(w: Codes, x: QuantisedRows, bias: Tensor | None, *, batch_invariant: bool) -> Tensor:
    """`multiply_rows` by Triton's kernel."""
    rows, (features, depth) = x.shape[0], w.shape
    y = torch.empty((rows, features), dtype=x.dtype, device=x.codes.device)
    if rows == 0:
        return y
    gpu, group = gpu_properties(y.device), x.format.group
    launch, block_k = pick_w8a8_launch(rows, features, group, gpu, batch_invariant=batch_invariant)
    _w8a8_linear[(triton.cdiv(rows, launch.block_m), triton.cdiv(features, launch.block_n))](
        x.codes, x.scales, w.codes.view(x.codes.dtype), w.scales, bias, y, rows, features, depth, w.codes.shape[1],
        GROUP=group, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=block_k,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _w8a8_linear(
    x, x_scales, codes, scales, bias, y, rows, features, depth, row_bytes, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_m, has_n = m < rows, n < features
    sums = _multiply_codes(
        x, x_scales, codes, scales, m, n, has_m, has_n, rows, features, depth, row_bytes, GROUP, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    if bias is not None:
        sums += tl.load(bias + n, has_n, other=0.0).to(tl.float32)[:, None]
    to = y + m.to(tl.int64)[None, :] * features + n[:, None]
    tl.store(to, sums.to(y.dtype.element_ty), has_n[:, None] & has_m[None, :])


@triton.jit
def _multiply_codes(
    x, x_scales, codes, scales, m, n, has_m, has_n, rows, features, depth, row_bytes, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: rows n of the weight times rows m of x. `rows`: the rows of the whole x. `features`:
    the rows of the whole weight. BLOCK_K divides GROUP."""
    is_integer: tl.constexpr = x.dtype.element_ty == tl.int8
    k = tl.arange(0, BLOCK_K)
    at_code = codes + n.to(tl.int64)[:, None] * row_bytes + k[None, :]
    at_x = x + m.to(tl.int64)[None, :] * depth + k[:, None]
    if GROUP == 0:
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if is_integer else tl.float32)
        for start in range(0, depth, BLOCK_K):
            has_k = k < depth - start
            weight = tl.load(at_code + start, has_n[:, None] & has_k[None, :], other=0.0)
            part = tl.load(at_x + start, has_k[:, None] & has_m[None, :], other=0.0)
            if is_integer:
                sums = tl.dot(weight, part, sums, out_dtype=tl.int32)
            else:
                # Hopper's FP8 products are summed with fewer bits than float32, so only BLOCK_K of them are; these sums
                # are added in float32.
                sums = tl.dot(weight, part, sums, max_num_imprecise_acc=BLOCK_K)
        factors = _factors(x_scales, scales, m, n, has_m, has_n)
        result = sums.to(tl.float32) * factors
    else:
        result = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, depth, BLOCK_K):
            has_k = k < depth - start
            weight = tl.load(at_code + start, has_n[:, None] & has_k[None, :], other=0.0)
            part = tl.load(at_x + start, has_k[:, None] & has_m[None, :], other=0.0)
            group = (tl.minimum(start, depth - 1) // GROUP).to(tl.int64)
            factors = _factors(x_scales + group * rows, scales + group * features, m, n, has_m, has_n)
            product = tl.dot(weight, part, out_dtype=tl.int32 if is_integer else tl.float32)
            result += product.to(tl.float32) * factors
    return result


@triton.jit
def _factors(x_scales, scales, m, n, has_m, has_n):
    """float32 [BLOCK_N, BLOCK_M]: the scales of a group of the weight times those of x."""
    of_x = tl.load(x_scales + m, has_m, other=0.0)
    return _scale(tl.load(scales + n, has_n, other=0))[:, None] * of_x[None, :]
