"""Quantised rows of the KV pool: fp8, int8 or int4 elements with one float16 scale for each row.

    scale = float16(max(abs(x)) / max_value),   y = clamp(round(x / scale), -max_value, max_value),   x ~ y * scale

A row is one head of one token. The dtypes are float8_e4m3fn (max_value 448), int8 (127), and uint8 for int4 (7). All
round to nearest even. Byte i of an int4 row has element i, plus 8, in its low nibble, and element i + head_dim / 2,
plus 8, in its high nibble. A row of zeros has scale 0. A row with a NaN has the scale NaN and elements 0.

Attention never multiplies elements by scales: the scale of a key multiplies its scores, the scale of a value its
weight, and the scale of a latent both.

Linears over quantised weights (kernels/layers) convert their codes and scales by the functions of this file, too.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

MAX_VALUE: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, torch.uint8: 7.0}
FP8, INT8, INT4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# {dtype: the KIND argument of kernels}. KIND 0: not quantised.
KINDS: Final = {torch.float8_e4m3fn: 1, torch.int8: 2, torch.uint8: 3}

# They convert four bytes in one register to four float16 in two registers. The bits of an e4m3 number, shifted into a
# float16, are 2^-8 times its value. A float16 with the high byte 0x64 and the low byte b is 1024 + b.
_PTX_FP8 = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }")
_PTX_FP8_SHIFTS = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e; prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; mov.b32 e, 0x5C005C00;"
    "and.b32 c, a, 0x7F007F00; shr.u32 c, c, 1; and.b32 a, a, 0x80008000; or.b32 a, a, c;"
    "and.b32 d, b, 0x7F007F00; shr.u32 d, d, 1; and.b32 b, b, 0x80008000; or.b32 b, b, d;"
    "mul.f16x2 $0, a, e; mul.f16x2 $1, b, e; }"
)
_PTX_INT8 = tl.constexpr(
    "{ .reg .b32 a, b, c; xor.b32 a, $2, 0x80808080; mov.b32 c, 0x64806480;"
    "prmt.b32 b, a, 0x64646464, 0x4342; prmt.b32 a, a, 0x64646464, 0x4140; sub.f16x2 $0, a, c; sub.f16x2 $1, b, c; }"
)
_PTX_INT4 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e; and.b32 a, $4, 0x0F0F0F0F; shr.u32 c, $4, 4; and.b32 c, c, 0x0F0F0F0F;"
    "mov.b32 e, 0x64086408; prmt.b32 b, a, 0x64646464, 0x4342; prmt.b32 a, a, 0x64646464, 0x4140;"
    "prmt.b32 d, c, 0x64646464, 0x4342; prmt.b32 c, c, 0x64646464, 0x4140;"
    "sub.f16x2 $0, a, e; sub.f16x2 $1, b, e; sub.f16x2 $2, c, e; sub.f16x2 $3, d, e; }"
)
# These convert them to four bfloat16. A bfloat16 with the high byte 0x43 and the low byte b < 128 is 128 + b; 0x4380 is
# 256. The bits of an e4m3 number, shifted, are 2^-120 times its value, and NaN becomes 480.
_PTX_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e, f; prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; mov.b32 e, 0x7B807B80;"
    "mov.b32 f, 0x80008000; shr.u32 c, a, 4; and.b32 c, c, 0x07F007F0; and.b32 a, a, f; or.b32 a, a, c;"
    "shr.u32 d, b, 4; and.b32 d, d, 0x07F007F0; and.b32 b, b, f; or.b32 b, b, d;"
    "fma.rn.bf16x2 $0, a, e, f; fma.rn.bf16x2 $1, b, e, f; }"
)
_PTX_INT8_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e; prmt.b32 a, $2, 0x43434343, 0x4140; prmt.b32 b, $2, 0x43434343, 0x4342;"
    "mov.b32 e, 0xBF80BF80; and.b32 c, a, 0xFF80FF80; and.b32 a, a, 0xFF7FFF7F; fma.rn.bf16x2 $0, c, e, a;"
    "and.b32 d, b, 0xFF80FF80; and.b32 b, b, 0xFF7FFF7F; fma.rn.bf16x2 $1, d, e, b; }"
)
_PTX_INT4_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e, f; and.b32 a, $4, 0x0F0F0F0F; shr.u32 c, $4, 4; and.b32 c, c, 0x0F0F0F0F;"
    "mov.b32 e, 0x3F803F80; mov.b32 f, 0xC308C308;"
    "prmt.b32 b, a, 0x43434343, 0x4342; prmt.b32 a, a, 0x43434343, 0x4140;"
    "prmt.b32 d, c, 0x43434343, 0x4342; prmt.b32 c, c, 0x43434343, 0x4140;"
    "fma.rn.bf16x2 $0, a, e, f; fma.rn.bf16x2 $1, b, e, f; fma.rn.bf16x2 $2, c, e, f; fma.rn.bf16x2 $3, d, e, f; }"
)
# The bits of an e2m1 number, moved into a bfloat16, are 2^-126 times its value.
_PTX_FP4_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e, f; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; mov.b32 e, 0x7E807E80;"
    "mov.b32 f, 0x80008000;"
    "shl.b32 c, a, 12; and.b32 c, c, f; shl.b32 d, a, 6; and.b32 d, d, 0x01C001C0; or.b32 c, c, d;"
    "fma.rn.bf16x2 $0, c, e, f;"
    "shl.b32 c, b, 12; and.b32 c, c, f; shl.b32 d, b, 6; and.b32 d, d, 0x01C001C0; or.b32 c, c, d;"
    "fma.rn.bf16x2 $1, c, e, f;"
    "shl.b32 c, a, 8; and.b32 c, c, f; shl.b32 d, a, 2; and.b32 d, d, 0x01C001C0; or.b32 c, c, d;"
    "fma.rn.bf16x2 $2, c, e, f;"
    "shl.b32 c, b, 8; and.b32 c, c, f; shl.b32 d, b, 2; and.b32 d, d, 0x01C001C0; or.b32 c, c, d;"
    "fma.rn.bf16x2 $3, c, e, f; }"
)


@triton.jit
def _round(x):
    """Round to the nearest integer, ties to even, for abs(x) < 2^22: x + 1.5 * 2^23 has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp8_bits(x):
    """The e4m3 byte of a float32 from -448 to 448. Subnormal values (below 2^-6) are rounded to multiples of 2^-9."""
    bits = x.to(tl.uint32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    size = rest.to(tl.float32, bitcast=True)
    normal = (rest + 0x7FFFF + ((rest >> 20) & 1) - (120 << 23)) >> 20
    small = _round(tl.minimum(size, 0.015625) * 512.0).to(tl.uint32)
    return ((bits >> 24) & 0x80) | tl.where(size < 0.015625, small, normal)


@triton.jit
def _scale_and_inverse(top, KIND: tl.constexpr):
    """(scale, 1 / scale) of a row whose largest magnitude is `top`; (NaN, 0) of NaN."""
    max_value: tl.constexpr = 448.0 if KIND == 1 else (127.0 if KIND == 2 else 7.0)
    exact = tl.div_rn(top, tl.full([], max_value, tl.float32))
    scale = tl.where(exact > 65504.0, 65504.0, exact).to(tl.float16)
    wide = scale.to(tl.float32)
    return scale, tl.where(wide > 0, tl.div_rn(tl.full([], 1.0, tl.float32), tl.where(wide > 0, wide, 1.0)), 0.0)


@triton.jit
def _quantised(x, inverse_scale, KIND: tl.constexpr):
    """float32 elements -> quantised elements, as bytes. int4: one nibble (value + 8) in each byte; the caller joins two
    nibbles."""
    if KIND == 1:
        y = _fp8_bits(tl.minimum(tl.maximum(x * inverse_scale, -448.0), 448.0))
    elif KIND == 2:
        y = _round(tl.minimum(tl.maximum(x * inverse_scale, -127.0), 127.0)).to(tl.int32)
    else:
        y = _round(tl.minimum(tl.maximum(x * inverse_scale, -7.0), 7.0)).to(tl.int32) + 8
    return y.to(tl.uint8)


@triton.jit
def _widened(x, KIND: tl.constexpr, CONVERT: tl.constexpr, dtype: tl.constexpr, FREE: tl.constexpr):
    """fp8 and int8 elements, as bytes -> exact floats, without their scale. KIND 0: elements -> `dtype`.

    PTX converts four bytes at once. Without PTX the integer becomes the low mantissa bits of a power of two, which is
    then subtracted. FREE is Triton's `is_pure`: the compiler may move a change of layout from before the conversion to
    after it. That is faster for a left or transposed operand of a matrix product; a right operand that is not
    transposed would be loaded byte by byte."""
    if KIND == 0:
        y = x.to(dtype)
    elif CONVERT >= 2 and dtype == tl.float16:
        code: tl.constexpr = _PTX_INT8 if KIND == 2 else (_PTX_FP8 if CONVERT == 3 else _PTX_FP8_SHIFTS)
        y = tl.inline_asm_elementwise(code, "=r,=r,r", [x], tl.float16, FREE, 4)
    elif CONVERT >= 2 and dtype == tl.bfloat16:
        from_byte: tl.constexpr = _PTX_INT8_BF16 if KIND == 2 else _PTX_FP8_BF16
        y = tl.inline_asm_elementwise(from_byte, "=r,=r,r", [x], tl.bfloat16, FREE, 4)
    elif KIND == 1 and (CONVERT == 1 or CONVERT == 3):
        y = x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif dtype == tl.float16:
        wide = x.to(tl.uint16)
        if KIND == 1:
            y = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        else:
            y = ((wide ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif KIND == 1:
        wide = x.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        y = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    else:
        bits = (x ^ 0x80).to(tl.uint32) | 0x4B000000
        y = (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    return y


@triton.jit
def _nibbles(x, CONVERT: tl.constexpr, dtype: tl.constexpr, FREE: tl.constexpr):
    """int4 elements, two in a byte -> (low nibbles - 8, high nibbles - 8) in `dtype`. CONVERT, FREE: see `_widened`."""
    if CONVERT >= 2 and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _PTX_INT4, "=r,=r,=r,=r,r", [x], (tl.float16, tl.float16), FREE, 4
        )  # fmt: skip
    elif CONVERT >= 2 and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _PTX_INT4_BF16, "=r,=r,=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), FREE, 4
        )  # fmt: skip
    elif dtype == tl.float16:
        wide = x.to(tl.uint16)
        low = ((wide & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        high = ((wide >> 4) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        wide = x.to(tl.uint32)
        low = (((wide & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(dtype)
        high = (((wide >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(dtype)
    return low, high


@triton.jit
def _e2m1_halves(x, CONVERT: tl.constexpr, dtype: tl.constexpr, FREE: tl.constexpr):
    """fp4 (e2m1) elements, two in a byte -> (those of the low halves, those of the high halves) in `dtype`. The bits of
    an e2m1 number, moved into a float32, are 2^-126 times its value. CONVERT, FREE: see `_widened`."""
    if CONVERT >= 2 and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _PTX_FP4_BF16, "=r,=r,=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), FREE, 4
        )  # fmt: skip
    else:
        wide = x.to(tl.uint32)
        low_bits = ((wide & 8) << 28) | ((wide & 7) << 22)
        high_bits = ((wide & 128) << 24) | ((wide & 112) << 18)
        low = (low_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)  # 2^126
        high = (high_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)
    return low, high


@triton.jit
def _scaled(numbers, scale, zeros, zero, CONVERT: tl.constexpr):
    """(`numbers` - zero) * scale, rounded once to the dtype of `numbers`. A product of two bfloat16 numbers is rounded
    once also without float32."""
    is_narrow: tl.constexpr = numbers.dtype == tl.bfloat16 and CONVERT >= 2
    is_exact: tl.constexpr = scale.dtype == tl.bfloat16 or scale.dtype == tl.uint8
    if is_narrow and is_exact and zeros is None:
        result = _by_group(numbers, _scale(scale).to(tl.bfloat16), False)
    else:
        wide = numbers.to(tl.float32)
        if zeros is not None:
            wide = _by_group(wide, zero.to(tl.float32), True)
        result = _by_group(wide, _scale(scale), False).to(numbers.dtype)
    return result


@triton.jit
def _by_group(numbers, of_group, SUBTRACT: tl.constexpr):
    """`numbers` [N, STEP] times `of_group`, or with SUBTRACT minus `of_group`, which is [N], or [N, groups] if several
    groups share the columns."""
    shape: tl.constexpr = numbers.shape
    if len(of_group.shape) == 1:
        result = numbers - of_group[:, None] if SUBTRACT else numbers * of_group[:, None]
    else:
        groups: tl.constexpr = of_group.shape[1]
        apart = tl.reshape(numbers, [shape[0], groups, shape[1] // groups])
        apart = apart - of_group[:, :, None] if SUBTRACT else apart * of_group[:, :, None]
        result = tl.reshape(apart, [shape[0], shape[1]])
    return result


@triton.jit
def _scale(scale):
    """float32 of a scale. A byte e stands for 2^(e - 127) (E8M0), and 255 for NaN. 2^-127 is subnormal: bit 22 alone is
    set. With bit 22 the bits of infinity are a NaN."""
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32) << 23
        return tl.where((bits == 0) | (bits == 0x7F800000), bits | (1 << 22), bits).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _narrowed(x, more, ALONE: tl.constexpr):
    """(x / divisor, more / divisor, divisor) of query rows, in float16, to which quantised bytes are converted. `more`:
    for int4, the second half of each row. `divisor`: a power of two that keeps all elements in the range of float16;
    one for each row if ALONE, else one for all rows. float32 rows are returned unchanged, with the divisor 1."""
    if x.dtype == tl.float32:
        divisor = tl.full([x.shape[0]], 1.0, tl.float32) if ALONE else tl.full([], 1.0, tl.float32)
    else:
        x, more = x.to(tl.float32), more.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(more), 1))
        if not ALONE:
            top = tl.max(top, 0)
        bits = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23), 227 << 23)
        divisor = bits.to(tl.float32, bitcast=True)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
        if ALONE:
            inverse = inverse[:, None]
        x, more = (x * inverse).to(tl.float16), (more * inverse).to(tl.float16)
    return x, more, divisor


@triton.jit
def _value_scale_factor(KIND: tl.constexpr):
    """The factor by which `_scales_of` multiplies the scales of values. It keeps their products with weights in the
    range of float16. The results are divided by it."""
    return 256.0 if KIND == 1 else (64.0 if KIND == 2 else (4.0 if KIND == 3 else 1.0))


@triton.jit
def _scales_of(
    k_scales, v_scales, table, first, end, held, kv_head, k_stride, v_stride,
    KIND: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(scales of the tile's keys, scales of its values times `_value_scale_factor`), float32 [TILE]. If MASKED, scales
    of values that are not `held` (those from `end` on) are 0: their memory could be NaN.

    Two scales are read as one word, because the compiler does not prefetch loads of less than four bytes.
    """
    pairs = 2 * tl.arange(0, TILE // 2)
    nth, row = _locate_keys(first, pairs, SIZE, TILE)
    block = tl.load(table + nth, first + pairs < end, other=0).to(tl.int64)
    at = (kv_head * SIZE + row) // 2
    k_scale = _halves(tl.load(k_scales + block * k_stride + at))
    v_scale = _halves(tl.load(v_scales + block * v_stride + at)) * _value_scale_factor(KIND)
    v_scale = tl.where(v_scale > 65504.0, 65504.0, v_scale)  # a minimum would drop NaN
    if MASKED:
        v_scale = tl.where(held, v_scale, 0.0)
    return k_scale, v_scale


@triton.jit
def _halves(words):
    """The two float16 numbers of each 32-bit word, low half first, as float32."""
    low, high = words.to(tl.uint16), (words >> 16).to(tl.uint16)
    return tl.join(low, high).reshape(2 * words.shape[0]).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _locate_keys(first, across, SIZE: tl.constexpr, TILE: tl.constexpr):
    """(index of each key's block in the block table, the key's row in the block). `first`: the tile's first key.
    `across`: offsets of the keys in the tile."""
    if TILE % SIZE == 0:
        nth, row = first // SIZE + across // SIZE, across % SIZE
    else:
        nth, row = (first + across) // SIZE, (first + across) % SIZE
    return nth, row


def quantise_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., dim] -> elements [..., dim] (int4: [..., dim / 2]) of `dtype`, and scales float16 [...]."""
    wide, max_value = x.float(), MAX_VALUE[dtype]
    scale = (wide.abs().amax(dim=-1) / max_value).clamp(max=65504.0).half()
    inverse_scale = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    y = (wide * inverse_scale[..., None]).clamp(-max_value, max_value)
    if dtype == torch.float8_e4m3fn:
        return y.to(dtype), scale
    y = y.round().to(torch.int8)
    if dtype == torch.int8:
        return y, scale
    low, high = (y + 8).view(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scale


def widen_reference(elements: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., dim]: the inverse of `quantise_reference`, apart from its rounding."""
    if elements.dtype == torch.uint8:
        elements = torch.cat((elements & 15, elements >> 4), dim=-1).float() - 8
    return elements.float() * scales.float()[..., None]
