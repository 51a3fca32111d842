"""bfloat16 in Triton's interpreter, which stores it as uint16: casts truncate, and products multiply the uint16.

`mend` corrects the operations that our kernels use, with the roundings of a GPU: casts round to nearest even, and
matrix products are in float32. Other arithmetic on bfloat16 is refused; no kernel needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_BF16 = tl.bfloat16


def mend() -> None:
    """Patch the interpreter for the rest of this process."""
    builder = interpreter.InterpreterBuilder
    cast, convert = builder.cast_impl, builder.create_fp_to_fp
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        was, becomes = x.dtype.scalar, to.scalar
        if _BF16 not in (was, becomes) or was == becomes:
            return cast(self, x, to)
        if was == _BF16:
            wide = interpreter.TensorHandle(_widened(x.data), tl.float32)
            return wide if becomes == tl.float32 else cast(self, wide, to)
        wide = (
            convert(self, x, tl.float32, None) if was.is_floating() and was != tl.float32 else cast(self, x, tl.float32)
        )
        return interpreter.TensorHandle(_rounded(wide.data), _BF16)

    def create_fp_to_fp(self: Any, x: Any, to: Any, mode: Any) -> Any:
        return cast_impl(self, x, to) if _BF16 in (x.dtype.scalar, to.scalar) else convert(self, x, to, mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(_widened(x.data), tl.float32) if x.dtype.scalar == _BF16 else x for x in (a, b)
        )
        return dot(self, a, b, d, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        assert _BF16 not in (lhs.dtype.scalar, rhs.dtype.scalar), "arithmetic of bfloat16s, which is not emulated"
        return binary(self, lhs, rhs, op)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        assert x.dtype.scalar != _BF16, "arithmetic of bfloat16s, which is not emulated"
        return unary(self, x, op)

    for name, mended in (
        ("cast_impl", cast_impl), ("create_fp_to_fp", create_fp_to_fp), ("create_dot", create_dot),
        ("binary_op", binary_op), ("unary_op", unary_op),
    ):  # fmt: skip
        setattr(builder, name, mended)


def _widened(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
