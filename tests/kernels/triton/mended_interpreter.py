"""Triton's interpreter with matrix products whose rows do not depend on their place in the tile, and with less work.

Products: on a GPU each row of a tile has the same order of summation, and our kernels' batch invariance rests on that.
The interpreter calls numpy's matmul. Its BLAS may sum the last rows of a tile in another order than the first rows:
OpenBLAS does so on processors with AVX2 alone. numpy's einsum has one loop for all rows.

Work: the interpreter patches triton.language again at every call of a device function, and builds a table of types for
every tensor. Both took 40% of the time of our kernels there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend_products() -> None:
    """Replace the interpreter's matrix products, for the rest of this process."""
    interpreter.np = _NumpyWithOrderedProducts()


class _NumpyWithOrderedProducts:
    """numpy, with another matmul."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        setattr(self, name, found)  # the next look-up finds the attribute
        return found

    def matmul(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
        """a: [..., M, K]. b: [..., K, N]. Return [..., M, N]."""
        product: np.ndarray[Any, Any] = np.einsum("...ik,...kj->...ij", a, b, dtype=dtype, casting="unsafe")
        return product


class _LastingPatches:
    """The patches of a launch, which stay: nothing in this process compiles kernels."""

    def restore(self) -> None: ...


def patch_once() -> None:
    """Patch triton.language once for each set of names that kernels see it by, and keep the table of types, for the
    rest of this process."""
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    seen: set[tuple[bool, bool]] = set()
    types: dict[str, Any] = {}

    def patch_lang(function: Any) -> _LastingPatches:
        names = function.__globals__.values()
        visible = any(value is tl for value in names), any(value is tl.core for value in names)
        if visible not in seen:
            patch(function)
            seen.add(visible)
        return _LastingPatches()

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in types:
            types[name] = look_up(dtype)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, numpy_type
