"""The blocks of GGUF's tensor types as codes with scales and zero points.

    weight = (code - zero) × scale

in float32, which gives the values that llama.cpp computes; those of types with a minimum may differ by a rounding of
float32. A block of llama.cpp has 32 or 256 columns of a row. The types are described in ggml's ggml-quants.c and in the
`gguf` package, which dequantises the types that have no codes here. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

PLAIN: Final = {Type.F32: "F32", Type.F16: "F16", Type.BF16: "BF16"}  # types that are not quantised: safetensors' names
_TABLE: Final = np.array(quants.IQ4_NL.kvalues, np.int8)  # the values of IQ4_NL's and IQ4_XS's codes


class Kind(Enum):
    """What a code is."""

    INT8 = "int8"
    INT4 = "int4"  # from -8 to 7
    FP4 = "fp4"  # e2m1, with an exponent of two for each group


@dataclass(frozen=True, slots=True)
class CodeForm:
    """How a weight is written. `group`: columns that share a scale. `scales`: their dtype, by safetensors' name.
    `has_zeros`: each group has a zero point, a float32."""

    kind: Kind
    group: int
    scales: str
    has_zeros: bool = False

    def common(self, other: "CodeForm") -> "CodeForm | None":
        """A form in which weights of both forms have equal values; None if there is none."""
        if self == other:
            return self
        if Kind.FP4 in (self.kind, other.kind):
            return None
        return CodeForm(
            self.kind if self.kind is other.kind else Kind.INT8,
            min(self.group, other.group),
            self.scales if self.scales == other.scales else "F32",
            self.has_zeros or other.has_zeros,
        )


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """`codes`: int8 [rows, columns]; of FP4 uint8, the bits of each. `scales`, `zeros`: [rows, groups]; scales of FP4
    are exponents, uint8."""

    codes: Array
    scales: Array
    zeros: Array | None = None

    def in_form(self, own: CodeForm, wanted: CodeForm) -> "BlockCodes":
        """The same weights in the form `wanted`, which is a common form of `own`."""
        if own == wanted:
            return self
        times = own.group // wanted.group
        scales = self.scales.astype(_NUMPY[wanted.scales]).repeat(times, axis=1)
        zeros = self.zeros
        if zeros is None and wanted.has_zeros:
            zeros = np.zeros_like(self.scales, np.float32)
        return replace(self, scales=scales, zeros=None if zeros is None else zeros.repeat(times, axis=1))


_NUMPY: Final = {"F32": np.float32, "F16": np.float16}

FORMS: Final[Mapping[Type, CodeForm]] = {
    Type.Q4_0: CodeForm(Kind.INT4, 32, "F16"),
    Type.Q4_1: CodeForm(Kind.INT4, 32, "F32", has_zeros=True),
    Type.Q5_0: CodeForm(Kind.INT8, 32, "F16"),
    Type.Q5_1: CodeForm(Kind.INT8, 32, "F32", has_zeros=True),
    Type.Q8_0: CodeForm(Kind.INT8, 32, "F16"),
    Type.Q2_K: CodeForm(Kind.INT4, 16, "F32", has_zeros=True),
    Type.Q3_K: CodeForm(Kind.INT4, 16, "F32"),
    Type.Q4_K: CodeForm(Kind.INT4, 32, "F32", has_zeros=True),
    Type.Q5_K: CodeForm(Kind.INT8, 32, "F32", has_zeros=True),
    Type.Q6_K: CodeForm(Kind.INT8, 16, "F32"),
    Type.IQ4_NL: CodeForm(Kind.INT8, 32, "F16"),
    Type.IQ4_XS: CodeForm(Kind.INT8, 32, "F32"),
    Type.MXFP4: CodeForm(Kind.FP4, 32, "U8"),
}


def read_codes(kind: Type, rows: Bytes) -> BlockCodes:
    """The codes of rows of a type in FORMS. `rows`: their stored bytes, uint8 [rows, row_bytes]."""
    _, size = GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(rows).reshape(-1, size)
    codes, scales, zeros = _READERS[kind](blocks)
    count = len(rows)
    return BlockCodes(
        codes.reshape(count, -1), scales.reshape(count, -1), None if zeros is None else zeros.reshape(count, -1)
    )


def dequantise(kind: Type, rows: Bytes) -> NDArray[np.float32]:
    """The values [rows, columns] of rows of any type. Raises NotImplementedError for a type without a known formula."""
    form = FORMS.get(kind)
    if form is None or form.kind is Kind.FP4 or form.has_zeros:
        values: NDArray[np.float32] = quants.dequantize(np.ascontiguousarray(rows), kind)
        return values
    codes = read_codes(kind, rows)  # the same values, of K-quants in less than half of the time
    grouped = codes.codes.reshape(len(rows), -1, form.group).astype(np.float32)
    grouped *= codes.scales.astype(np.float32)[..., np.newaxis]
    return grouped.reshape(len(rows), -1)


def can_dequantise(kind: Type) -> bool:
    """Whether `dequantise` knows the type."""
    return kind in PLAIN or kind in quants._type_traits


_Parts = tuple[Array, Array, Array | None]


def _cut(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """The blocks' bytes in pieces of these sizes, and the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(piece: Bytes) -> Array:
    return np.ascontiguousarray(piece).view(np.float16)


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unsigned fields of `bits` bits. Each `run` bytes hold 8 / bits runs of fields, the first in the lowest bits."""
    # Shifts of whole arrays are several times as fast as those of runs.
    packed = np.ascontiguousarray(packed)
    fields = np.empty((len(packed), packed.shape[1] // run, 8 // bits, run), np.uint8)
    for place in range(8 // bits):
        shifted = packed >> np.uint8(bits * place)
        shifted &= np.uint8((1 << bits) - 1)
        fields[:, :, place] = shifted.reshape(len(packed), -1, run)
    return fields.reshape(len(packed), -1)


def _with_minimum(codes: Array, scales: Array, minima: Array, middle: int) -> _Parts:
    """Codes of weights code × scale - minimum, from which `middle` is subtracted. In a group with the scale 0, each
    weight is -minimum."""
    scales, minima = scales.astype(np.float32), minima.astype(np.float32)
    is_flat = scales == 0
    with np.errstate(over="ignore"):
        zeros = minima / np.where(is_flat, np.float32(1), scales)
    # A zero point beyond float32, with a scale so small that no code changes the weight.
    is_flat |= ~np.isfinite(zeros)
    zeros = np.where(is_flat, np.float32(1), zeros - np.float32(middle))
    scales = np.where(is_flat, minima, scales)
    codes = codes.view(np.int8) - np.int8(middle)
    group = codes.shape[1] // scales.shape[1]
    codes = np.where(is_flat.repeat(group, axis=1), np.int8(0), codes) if is_flat.any() else codes
    return codes, scales, zeros


def _q4_0(blocks: Bytes) -> _Parts:
    scales, packed = _cut(blocks, 2)
    return _fields(packed, 4, 16).view(np.int8) - np.int8(8), _half(scales), None


def _q4_1(blocks: Bytes) -> _Parts:
    scales, offsets, packed = _cut(blocks, 2, 2)
    return _with_minimum(_fields(packed, 4, 16), _half(scales), -_half(offsets).astype(np.float32), 8)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Codes of 5 bits. `high`: 4 bytes, a bit for each of 32 codes. `low`: 16 bytes."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _fields(low, 4, 16) | bits << np.uint8(4)


def _q5_0(blocks: Bytes) -> _Parts:
    scales, high, low = _cut(blocks, 2, 4)
    return _five_bits(high, low).view(np.int8) - np.int8(16), _half(scales), None


def _q5_1(blocks: Bytes) -> _Parts:
    scales, offsets, high, low = _cut(blocks, 2, 2, 4)
    return _with_minimum(_five_bits(high, low), _half(scales), -_half(offsets).astype(np.float32), 0)


def _q8_0(blocks: Bytes) -> _Parts:
    scales, codes = _cut(blocks, 2)
    return codes.view(np.int8), _half(scales), None


def _q2_k(blocks: Bytes) -> _Parts:
    both, packed, scale, minimum = _cut(blocks, 16, 64, 2)
    scales = _half(scale).astype(np.float32) * (both & np.uint8(15))
    minima = _half(minimum).astype(np.float32) * (both >> np.uint8(4))
    return _with_minimum(_fields(packed, 2, 32), scales, minima, 0)


def _q3_k(blocks: Bytes) -> _Parts:
    mask, packed, small, scale = _cut(blocks, 32, 64, 12)
    low, high = _cut(small, 8)
    steps = (_fields(low, 4, 8) | _fields(high, 2, 4) << np.uint8(4)).view(np.int8) - np.int8(32)
    is_small = _fields(mask, 1, 32) ^ np.uint8(1)  # a code without its bit in the mask is 4 smaller
    codes = _fields(packed, 2, 32).view(np.int8) - (is_small << np.uint8(2)).view(np.int8)
    return codes, _half(scale).astype(np.float32) * steps.astype(np.float32), None


def _steps_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and minima of a block of Q4_K or Q5_K, in 12 bytes."""
    first, second, third = _cut(packed, 4, 4)
    steps = np.hstack([first & np.uint8(63), third & np.uint8(15) | first >> np.uint8(2) & np.uint8(48)])
    minima = np.hstack([second & np.uint8(63), third >> np.uint8(4) | second >> np.uint8(2) & np.uint8(48)])
    return steps, minima


def _scales_and_minima(scale: Bytes, minimum: Bytes, packed: Bytes) -> tuple[Array, Array]:
    steps, minima = _steps_and_minima(packed)
    return _half(scale).astype(np.float32) * steps, _half(minimum).astype(np.float32) * minima


def _q4_k(blocks: Bytes) -> _Parts:
    scale, minimum, small, packed = _cut(blocks, 2, 2, 12)
    return _with_minimum(_fields(packed, 4, 32), *_scales_and_minima(scale, minimum, small), 8)


def _q5_k(blocks: Bytes) -> _Parts:
    scale, minimum, small, high, packed = _cut(blocks, 2, 2, 12, 32)
    codes = _fields(packed, 4, 32) | _fields(high, 1, 32) << np.uint8(4)
    return _with_minimum(codes, *_scales_and_minima(scale, minimum, small), 0)


def _q6_k(blocks: Bytes) -> _Parts:
    low, high, steps, scale = _cut(blocks, 128, 64, 16)
    codes = (_fields(low, 4, 64) | _fields(high, 2, 32) << np.uint8(4)).view(np.int8) - np.int8(32)
    return codes, _half(scale).astype(np.float32) * steps.view(np.int8).astype(np.float32), None


def _iq4_nl(blocks: Bytes) -> _Parts:
    scales, packed = _cut(blocks, 2)
    return _TABLE[_fields(packed, 4, 16)], _half(scales), None


def _iq4_xs(blocks: Bytes) -> _Parts:
    scale, high, low, packed = _cut(blocks, 2, 2, 4)
    lower = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=2).reshape(len(low), 8)
    upper = np.ascontiguousarray(high).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    steps = (lower | upper.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    return _TABLE[_fields(packed, 4, 16)], _half(scale).astype(np.float32) * steps.astype(np.float32), None


def _mxfp4(blocks: Bytes) -> _Parts:
    scales, packed = _cut(blocks, 1)
    return _fields(packed, 4, 16), scales, None


_READERS: Final[Mapping[Type, Callable[[Bytes], _Parts]]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
}
