"""Matrix products in Triton's interpreter whose rows do not depend on their place in the tile.

On a GPU each row of a tile has the same order of summation, and our kernels' batch invariance rests on that. The
interpreter calls numpy's matmul. Its BLAS may sum the last rows of a tile in another order than the first rows:
OpenBLAS does so on processors with AVX2 alone. numpy's einsum has one loop for all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def mend_products() -> None:
    """Patch the interpreter for the rest of this process."""
    interpreter.np = _NumpyWithOrderedProducts()


class _NumpyWithOrderedProducts:
    """numpy, with another matmul."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
        """a: [..., M, K]. b: [..., K, N]. Return [..., M, N]."""
        product: np.ndarray[Any, Any] = np.einsum("...ik,...kj->...ij", a, b, dtype=dtype, casting="unsafe")
        return product
