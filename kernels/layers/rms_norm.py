"""RMSNorm, alone or after the addition of a residual, computed in float32.

    h = x + residual                       (rounded to x.dtype: it is also returned as the new residual)
    n = h / sqrt(mean(h ** 2) + eps)       (float32)
    y = cast(n) * weight                   offset 0: the order of LlamaRMSNorm
    y = cast(n * (weight + offset))        otherwise: the order of GemmaRMSNorm (offset 1), and with `rounds_last` of
                                           NemotronHRMSNorm (offset 0)

Shapes: x, residual [..., hidden] (at most two leading dimensions, which may be strided, as in a slice of a fused
projection), weight [hidden], y like x and contiguous. One program normalises one row. `add_norm_and_quantise` writes y
as codes and scales, for a linear whose activations are quantised. `norm_rotate_and_store` is for norms over each head
of q and k, which on a GPU are part of the rotary kernel.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.rotary import HeadNorms, launch_with_norms, rotary_and_store
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.launch_check import (
    FLOATS,
    check_dense,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
    once_per_geometry,
    refuse,
)
from coatcheck.kernels.layers.quantised_rows import (
    QuantisedRows,
    RowFormat,
    _largest_magnitude,
    _store_codes,
    code_arguments,
    quantise_rows,
)


@triton.jit
def _rms_norm(
    x, residual, weight, out, codes, scales, total, inner, x_outer, x_inner, r_outer, r_inner, width, eps, offset,
    RESIDUAL: tl.constexpr, CAST_FIRST: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    element = x.dtype.element_ty
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
    y = (h * w).to(element)
    if out is not None:
        tl.store(out + row * width + at, y, mask)
    if codes is not None:
        y = y.to(tl.float32)
        _store_codes(y, _largest_magnitude(y, 0), codes, scales, row, tl.num_programs(0), 0, width, KIND, GROUP, BLOCK)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`weight`: [hidden]. `offset`: 1 if the checkpoint stores weights minus 1, as Gemma does. `rounds_last`: the norm
    is rounded after it is multiplied by the weight, also if the offset is 0. Raises LaunchRefused."""

    weight: Tensor
    eps: float
    offset: float = 0.0
    rounds_last: bool = False

    @property
    def rounds_first(self) -> bool:
        """Whether the norm is rounded to x.dtype before it is multiplied by the weight."""
        return self.offset == 0.0 and not self.rounds_last

    def __call__(self, x: Tensor) -> Tensor:
        """norm(x)"""
        return self._normalise(x, None)[0]

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._normalise(x, residual)

    def add_norm_and_quantise(
        self, x: Tensor, residual: Tensor | None, format: RowFormat, *, keeps_plain: bool = False
    ) -> tuple[QuantisedRows, Tensor]:
        """As `add_and_norm`, with the norm quantised, for x [rows, hidden]. Without a residual the second result is x.

        `keeps_plain`: the norm is also written unquantised, to `QuantisedRows.plain`.
        """
        if not uses_triton(x):
            y, total = self._normalise(x, residual)
            return quantise_rows(y, format)._replace(plain=y if keeps_plain else None), total
        _check(x, self.weight, residual)
        if x.dim() != 2:
            refuse("x", "shape [rows, hidden]", list(x.shape))
        rows = QuantisedRows.empty(x.shape[0], x.shape[1], format, x.dtype, x.device)
        if keeps_plain:
            rows = rows._replace(plain=torch.empty_like(x, memory_format=torch.contiguous_format))
        total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(x, residual, rows.plain, rows, total)
        return rows, total

    def _normalise(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm, what is normalised: x + residual, or x itself without a residual)."""
        _check(x, self.weight, residual)
        library = native.library_for(x)
        if library is None and not uses_triton(x):
            return rms_norm_reference(x, self.weight, self.eps, residual, self.offset, rounds_last=self.rounds_last)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        if library is None:
            self._launch(x, residual, out, None, total)
        else:
            outer, inner, width, x_outer, x_inner = _strides(x)
            _, _, _, r_outer, r_inner = (0,) * 5 if residual is None else _strides(residual)
            library.rms_norm(
                native.NORM.pack(
                    x.data_ptr(), 0 if residual is None else residual.data_ptr(), self.weight.data_ptr(),
                    out.data_ptr(), 0 if residual is None else total.data_ptr(),
                    outer, inner, width, x_outer, x_inner, r_outer, r_inner,
                    self.eps, self.offset, self.rounds_first, native.TYPES[x.dtype],
                )
            )  # fmt: skip
        return out, total

    def _launch(
        self, x: Tensor, residual: Tensor | None, out: Tensor | None, rows: QuantisedRows | None, total: Tensor
    ) -> None:
        """Write the norm to `out`, to `rows`, or to both, and x + residual to `total`."""
        outer, inner, width, x_outer, x_inner = _strides(x)
        _, _, _, r_outer, r_inner = (0,) * 5 if residual is None else _strides(residual)
        if outer * inner == 0:
            return
        block, codes, scales, constants = code_arguments(rows, width)
        _rms_norm[(outer * inner,)](
            x, x if residual is None else residual, self.weight, out, codes, scales, total,
            inner, x_outer, x_inner, r_outer, r_inner, width, self.eps, self.offset,
            RESIDUAL=residual is not None, CAST_FIRST=self.rounds_first, BLOCK=block, **constants,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip


def norm_rotate_and_store(
    q_norm: RmsNorm, k_norm: RmsNorm, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache,
    slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """`rotary_and_store` of q_norm(q) and k_norm(k), with norms over each head. One kernel on a GPU if both norms have
    the same eps and offset, and neither has `rounds_last`."""
    shared = q_norm.eps, q_norm.offset
    rounds_last = q_norm.rounds_last or k_norm.rounds_last
    if not uses_triton(q) or rounds_last or shared != (k_norm.eps, k_norm.offset):
        return rotary_and_store(q_norm(q), k_norm(k), v, cos, sin, cache, slot_mapping)
    norms = HeadNorms(q_norm.weight, k_norm.weight, *shared)
    return launch_with_norms(q, k, v, cos, sin, cache, slot_mapping, norms)


def _strides(x: Tensor) -> tuple[int, int, int, int, int]:
    """(outer, inner, width, stride over outer, stride over inner) of one to three dimensions."""
    shape, stride = x.shape, x.stride()
    if len(shape) == 3:
        return shape[0], shape[1], shape[2], stride[0], stride[1]
    if len(shape) == 2:
        return shape[0], 1, shape[1], stride[0], 0
    return 1, 1, shape[0], 0, 0


@once_per_geometry
def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if not 1 <= x.dim() <= 3:
        refuse("x", "one to three dimensions, the last one hidden", list(x.shape))
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    check_dense("weight", weight, (x.shape[-1],), x.dtype, x.device)
    if residual is not None:
        check_shape("residual", residual, tuple(x.shape))
        check_dtype("residual", residual, x.dtype)
        check_rows("residual", residual)
        check_device("residual", residual, x.device)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0, *,
    rounds_last: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = x if residual is None else x + residual
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset == 0.0 and not rounds_last:
        return weight * normed.to(x.dtype), h
    return (normed * (weight.float() + offset)).to(x.dtype), h
