"""y = rms_norm(x + residual) * (weight + weight_offset), computed in float32.

    h = x + residual                       (rounded to x.dtype: it is also returned as the new residual)
    n = h / sqrt(mean(h ** 2) + eps)       (float32)
    y = cast(n) * weight                   cast_first: the order of LlamaRMSNorm
    y = cast(n * (weight + offset))        otherwise: the order of GemmaRMSNorm (offset 1) and Olmo2RMSNorm (offset 0)

Shapes: x, residual [..., hidden] (up to two leading dimensions, which may be strided, as in a slice of a fused
projection), weight [hidden], out like x and dense. One program normalises one row.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.arch import takes_triton
from coatcheck.kernels.launch_check import (
    FLOATS,
    CheckedGeometries,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
    refuse,
)

_checked = CheckedGeometries()


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, inner, x_outer, x_inner, r_outer, r_inner, width, eps, offset,
    RESIDUAL: tl.constexpr, CAST_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    element = out.dtype.element_ty
    h = tl.load(x + row // inner * x_outer + row % inner * x_inner + at, mask, other=0.0)
    if RESIDUAL:
        more = tl.load(residual + row // inner * r_outer + row % inner * r_inner + at, mask, other=0.0)
        h = (h.to(tl.float32) + more.to(tl.float32)).to(element)
        tl.store(total + row * width + at, h, mask)
    h = h.to(tl.float32)
    h = h / tl.sqrt(tl.sum(h * h, 0) / width + eps)
    w = tl.load(weight + at, mask, other=0.0).to(tl.float32) + offset
    if CAST_FIRST:
        h = h.to(element).to(tl.float32)
    tl.store(out + row * width + at, (h * w).to(element), mask)


def launch_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, offset: float, cast_first: bool, out: Tensor,
    total: Tensor | None,
) -> None:  # fmt: skip
    outer, inner, width, x_outer, x_inner = _strides(x)
    _, _, _, r_outer, r_inner = (0,) * 5 if residual is None else _strides(residual)
    if outer * inner == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm[(outer * inner,)](
        x, x if residual is None else residual, weight, out, out if total is None else total,
        inner, x_outer, x_inner, r_outer, r_inner, width, eps, offset,
        RESIDUAL=residual is not None, CAST_FIRST=cast_first, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The parameters of one norm. `offset`: 1 if the checkpoint stores weights as their difference from 1."""

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=self.offset)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual=residual, weight_offset=self.offset)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: None = None,
    weight_offset: float = 0.0,
    cast_first: bool | None = None,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor,
    weight_offset: float = 0.0,
    cast_first: bool | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    cast_first: bool | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y, or (y, x + residual) if `residual` is given. `cast_first`: None for `weight_offset == 0`."""
    if _checked.is_new(x, weight, residual, out):
        _check(x, weight, residual, out)
        _checked.add(x, weight, residual, out)
    if cast_first is None:
        cast_first = weight_offset == 0.0
    library = native.library()
    on_gpu = takes_triton(x)
    if not on_gpu and (library is None or x.dtype not in native.TYPES or x.device.type != "cpu"):
        return rms_norm_reference(x, weight, eps, residual, weight_offset, cast_first, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if on_gpu or library is None:
        launch_rms_norm(x, weight, eps, residual, weight_offset, cast_first, out, total)
        return out if total is None else (out, total)
    outer, inner, width, x_outer, x_inner = _strides(x)
    _, _, _, r_outer, r_inner = (0,) * 5 if residual is None else _strides(residual)
    library.rms_norm(
        native.NORM.pack(
            x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            0 if total is None else total.data_ptr(), outer, inner, width, x_outer, x_inner, r_outer, r_inner,
            eps, weight_offset, cast_first, native.TYPES[x.dtype],
        )
    )  # fmt: skip
    return out if total is None else (out, total)


def _strides(x: Tensor) -> tuple[int, int, int, int, int]:
    """(outer, inner, width, stride over outer, stride over inner) of one to three dimensions."""
    shape, stride = x.shape, x.stride()
    if len(shape) == 3:
        return shape[0], shape[1], shape[2], stride[0], stride[1]
    if len(shape) == 2:
        return shape[0], 1, shape[1], stride[0], 0
    return 1, 1, shape[0], 0, 0


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor | None) -> None:
    if not 1 <= x.dim() <= 3:
        refuse("x", "one to three dimensions, the last one hidden", list(x.shape))
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    check_shape("weight", weight, (x.shape[-1],))
    check_dtype("weight", weight, x.dtype)
    check_contiguous("weight", weight)
    check_device("weight", weight, x.device)
    if residual is not None:
        check_shape("residual", residual, tuple(x.shape))
        check_dtype("residual", residual, x.dtype)
        check_rows("residual", residual)
        check_device("residual", residual, x.device)
    if out is not None:
        check_shape("out", out, tuple(x.shape))
        check_dtype("out", out, x.dtype)
        check_contiguous("out", out)
        check_device("out", out, x.device)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    cast_first: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        y = weight * normed.to(x.dtype) if weight_offset == 0.0 else (weight + weight_offset) * normed.to(x.dtype)
    else:
        y = (normed * (weight.float() + weight_offset)).to(x.dtype)
    if out is not None:
        y = out.copy_(y)
    return y if residual is None else (y, h)
