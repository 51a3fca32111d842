"""QuantisedRows: activations as codes of 8 bits, with scales computed at run time (dynamic quantisation).

    scales[g, r] = max(abs(x[r, k])) / largest,   codes[r, k] = round(x[r, k] / scales[g, r]),   g = k // group

`largest` is 448 for FP8 (e4m3) and 127 for INT8. The maximum is taken over the columns of group g. Codes are rounded to
nearest even. A group of zeros has scale 0. A group with a NaN or an infinity has the scale NaN and any codes, so each
output of a linear is NaN for that row. One group for a whole row is what vLLM and compressed-tensors call a dynamic
scale per token; DeepSeek's FP8 has groups of 128.

rms_norm.py and silu_mul.py inline `_store_codes`, so that the kernel that computes x also writes its codes. Both first
round x to the model's dtype, so their codes are those of `quantise_rows`.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.quantise import _quantised
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, refuse
from coatcheck.kernels.layers.quantised_weight import CodeKind

_LARGEST: Final = {CodeKind.FP8: 448.0, CodeKind.INT8: 127.0}
_DTYPES: Final = {CodeKind.FP8: torch.float8_e4m3fn, CodeKind.INT8: torch.int8}
_KINDS: Final = {CodeKind.FP8: 1, CodeKind.INT8: 2}  # as in kernels/kv/quantise.py
_LEAST_SCALE: Final = 2.0**-126  # below it the inverse is not finite
_LEAST: Final = tl.constexpr(_LEAST_SCALE)
BLOCK: Final = 4096  # columns that a program holds at a time


class RowFormat(NamedTuple):
    """How a linear reads x. `kind`: INT8 or FP8. `group`: how many consecutive columns share a scale, a power of two;
    0: the whole row."""

    kind: CodeKind
    group: int

    def groups(self, width: int) -> int:
        return 1 if self.group == 0 else -(-width // self.group)

    def constants(self) -> dict[str, int]:
        """The constexpr arguments of `_store_codes`."""
        return dict(KIND=_KINDS[self.kind], GROUP=self.group)


class QuantisedRows(NamedTuple):
    """`codes`: float8_e4m3fn or int8 [rows, width]. `scales`: float32 [groups, rows]. Both are contiguous. `dtype`: the
    dtype of x. `plain`: x itself if another layer, the router of experts, reads it; otherwise None."""

    codes: Tensor
    scales: Tensor
    format: RowFormat
    dtype: torch.dtype
    plain: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, width: int, format: RowFormat, dtype: torch.dtype, device: torch.device) -> QuantisedRows:
        codes = torch.empty((rows, width), dtype=_DTYPES[format.kind], device=device)
        scales = torch.empty((format.groups(width), rows), dtype=torch.float32, device=device)
        return cls(codes, scales, format, dtype)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantise(self) -> Tensor:
        """float32 [rows, width]."""
        width = self.shape[1]
        scales = self.scales.T.repeat_interleave(self.format.group or width, dim=1)[:, :width]
        return self.codes.float() * scales


def quantise_rows(x: Tensor, format: RowFormat) -> QuantisedRows:
    """x [rows, width]; rows may be strided. Raises LaunchRefused."""
    if x.dim() != 2:
        refuse("x", "two dimensions", list(x.shape))
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    if not uses_triton(x):
        return quantise_rows_reference(x, format)
    rows, width = x.shape
    out = QuantisedRows.empty(rows, width, format, x.dtype, x.device)
    if rows * width:
        block = pick_block(width, format)
        _quantise_rows[(rows,)](
            x, out.codes.view(torch.uint8), out.scales, x.stride(0), rows, width, **format.constants(), BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out


def pick_block(width: int, format: RowFormat) -> int:
    """How many columns of a row a program holds at a time, in kernels that loop over the row."""
    block: int = min(BLOCK, triton.next_power_of_2(width))
    return max(block, format.group)


def code_arguments(rows: QuantisedRows | None, width: int) -> tuple[int, Tensor | None, Tensor | None, dict[str, int]]:
    """(BLOCK, codes, scales, KIND and GROUP): arguments of a kernel that holds a whole row. `rows` None: it writes no
    codes."""
    block: int = triton.next_power_of_2(width)
    if rows is None:
        return block, None, None, dict(KIND=0, GROUP=0)
    return max(block, rows.format.group), rows.codes.view(torch.uint8), rows.scales, rows.format.constants()


@triton.jit(do_not_specialize=["rows"])
def _quantise_rows(x, codes, scales, stride, rows, width, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """One program quantises one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.zeros([], tl.float32)
    if GROUP == 0:
        for start in range(0, width, BLOCK):
            part = tl.load(x + row * stride + start + at, start + at < width, other=0.0).to(tl.float32)
            top = tl.maximum(top, _largest_magnitude(part, 0))
    for start in range(0, width, BLOCK):
        part = tl.load(x + row * stride + start + at, start + at < width, other=0.0).to(tl.float32)
        _store_codes(part, top, codes, scales, row, rows, start, width, KIND, GROUP, BLOCK)


@triton.jit
def _store_codes(
    values, top, codes, scales, row, rows, start, width, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantise the BLOCK columns of a row from `start` on, and store codes and scales.

    `values`: the columns, float32 [BLOCK], 0 past the end. `top`: `_largest_magnitude` of the whole row, if GROUP is 0.
    GROUP must divide `start`.
    """
    at = start + tl.arange(0, BLOCK)
    if GROUP == 0:
        scale, inverse = _scale_of_row(top, KIND)
        tl.store(scales + row, scale)
        y = _quantised(values, inverse, KIND)
    else:
        by_group = tl.reshape(values, [BLOCK // GROUP, GROUP])
        scale, inverse = _scale_of_row(_largest_magnitude(by_group, 1), KIND)
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group.to(tl.int64) * rows + row, scale, group * GROUP < width)
        y = tl.reshape(_quantised(by_group, inverse[:, None], KIND), [BLOCK])
    tl.store(codes + row * width + at, y, at < width)


@triton.jit
def _largest_magnitude(values, AXIS: tl.constexpr):
    """The largest magnitude of float32 `values` along AXIS; infinity if one of them is NaN, which tl.max would drop."""
    return tl.max(tl.where(values == values, tl.abs(values), float("inf")), AXIS)


@triton.jit
def _scale_of_row(top, KIND: tl.constexpr):
    """float32 (scale, 1 / scale) for the largest magnitude `top`; (0, 0) where the inverse would not be finite, and
    (NaN, 0) where `top` is infinite."""
    largest: tl.constexpr = 448.0 if KIND == 1 else 127.0
    scale = tl.div_rn(top, tl.full(top.shape, largest, tl.float32))
    is_zero = scale < _LEAST
    inverse = tl.div_rn(tl.full(top.shape, 1.0, tl.float32), tl.where(is_zero, 1.0, scale))
    scale = tl.where(top < float("inf"), scale, float("nan"))
    return tl.where(is_zero, 0.0, scale), tl.where(is_zero, 0.0, inverse)


def quantise_rows_reference(x: Tensor, format: RowFormat) -> QuantisedRows:
    rows, width = x.shape
    largest, group = _LARGEST[format.kind], format.group or width
    by_group = F.pad(x.float(), (0, -width % group)).view(rows, -1, group)
    top = by_group.abs().amax(2)
    scales = top / torch.full_like(top, largest)  # for a Python number torch multiplies by its inverse on GPUs
    scales = scales.where(scales >= _LEAST_SCALE, 0.0).where(top.isfinite(), torch.nan)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    y = (by_group * inverse[..., None]).clamp(-largest, largest).flatten(1)[:, :width]
    y = y.round() if format.kind is CodeKind.INT8 else y
    return QuantisedRows(y.to(_DTYPES[format.kind]).contiguous(), scales.T.contiguous(), format, x.dtype)
