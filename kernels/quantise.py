"""Rows of a quantised KV pool: few bits an element, and one float16 scale for each row.

    scale = float16(max(abs(x)) / most),   y = round(x / scale) within -most and most,   x ~ y * scale

A row is one token's one head. The kinds, by the dtype that holds them: float8_e4m3fn (most 448, rounded to nearest
even as all are), int8 (most 127), and uint8 for int4 (most 7): byte i of such a row holds element i + 8 in its low
nibble and element i + head_dim / 2, plus 8, in its high one. A row of zeros has scale 0.

Scales never have to meet the elements: a key's scale multiplies its scores, a value's its weight. `_widened` and
`_quantised` are what kernels inline; the file does not know where rows lie.
"""

# Device functions are a language of their own inside Python: their arguments are pointers and constants, not objects.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

MOST: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, torch.uint8: 7.0}
FP8, INT8, INT4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# The KIND of kernels; 0: floats, which are stored as they are.
KINDS: Final = {torch.float8_e4m3fn: 1, torch.int8: 2, torch.uint8: 3}


@triton.jit
def _round(x):
    """To the nearest whole number, ties to even, for abs(x) < 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp8_bits(x):
    """The e4m3 byte of a float32 within -448 and 448: two of its fields fit after a shift; the smallest are counted."""
    bits = x.to(tl.uint32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    size = rest.to(tl.float32, bitcast=True)
    normal = (rest + 0x7FFFF + ((rest >> 20) & 1) - (120 << 23)) >> 20
    small = _round(tl.minimum(size, 0.015625) * 512.0).to(tl.uint32)
    return ((bits >> 24) & 0x80) | tl.where(size < 0.015625, small, normal)


@triton.jit
def _unit_of(top, KIND: tl.constexpr):
    """(scale, 1 / scale) of a row whose largest magnitude is `top`."""
    most: tl.constexpr = 448.0 if KIND == 1 else (127.0 if KIND == 2 else 7.0)
    scale = tl.minimum(tl.div_rn(top, tl.full([], most, tl.float32)), 65504.0).to(tl.float16)
    unit = scale.to(tl.float32)
    return scale, tl.where(unit > 0, tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(unit > 0, unit, 1.0)), 0.0)


@triton.jit
def _quantised(x, unit, KIND: tl.constexpr):
    """float32 elements as bytes: whole ones of fp8 and int8; of int4 the nibble (+ 8), which the caller joins."""
    if KIND == 1:
        y = _fp8_bits(tl.minimum(tl.maximum(x * unit, -448.0), 448.0))
    elif KIND == 2:
        y = _round(tl.minimum(tl.maximum(x * unit, -127.0), 127.0)).to(tl.int32)
    else:
        y = _round(tl.minimum(tl.maximum(x * unit, -7.0), 7.0)).to(tl.int32) + 8
    return y.to(tl.uint8)


@triton.jit
def _widened(x, KIND: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Bytes as numbers of `dtype`, without their scale; of int4 it takes nibbles. Exact in bfloat16 and float16.

    No integer is converted by the slow instruction for it: its bits are put below the exponent of 2^23, and 2^23 is
    taken off again. NATIVE: the processor converts e4m3 itself (sm_89 and later)."""
    if KIND == 0:
        y = x.to(dtype)
    elif KIND == 1:
        if NATIVE:
            y = x.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            wide = x.to(tl.uint32)
            bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
            y = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    elif KIND == 2:
        bits = (x ^ 0x80).to(tl.uint32) | 0x4B000000
        y = (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    else:
        bits = x.to(tl.uint32) | 0x4B000000
        y = (bits.to(tl.float32, bitcast=True) - 8388616.0).to(dtype)
    return y


@triton.jit
def _scales_of(
    k_scales, v_scales, block, row, held, k_stride, v_stride, KIND: tl.constexpr
):  # fmt: skip
    """float32 scales of K's and V's rows; KIND 0 has none."""
    k_scale, v_scale = tl.zeros(row.shape, tl.float32), tl.zeros(row.shape, tl.float32)
    if KIND > 0:
        k_scale = tl.load(k_scales + block * k_stride + row, held, other=0.0).to(tl.float32)
        v_scale = tl.load(v_scales + block * v_stride + row, held, other=0.0).to(tl.float32)
    return k_scale, v_scale


def quantise_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., dim] -> elements [..., dim] (int4: [..., dim / 2]) of `dtype`, and scales float16 [...]."""
    wide, most = x.float(), MOST[dtype]
    scale = (wide.abs().amax(dim=-1) / most).clamp(max=65504.0).half()
    unit = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    y = (wide * unit[..., None]).clamp(-most, most)
    if dtype == torch.float8_e4m3fn:
        return y.to(dtype), scale
    y = y.round().to(torch.int8)
    if dtype == torch.int8:
        return y, scale
    low, high = (y + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scale


def widen_reference(elements: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., dim], the inverse of `quantise_reference` but for its rounding."""
    if elements.dtype == torch.uint8:
        elements = torch.cat((elements & 15, elements >> 4), dim=-1).float() - 8
    return elements.float() * scales.float()[..., None]
