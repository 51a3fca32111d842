"""The head sizes that the GPU kernels for gated delta nets compute.

This module does not import torch, because `coatcheck serve` checks the sizes before a rank starts.
"""

from typing import Final

# The most elements of a head's state: a program of 8 warps keeps them in registers.
MAX_STATE: Final = 128 * 128


def fits_gpu(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels compute heads of these sizes: powers of two, at least 16, with a product of at most
    MAX_STATE."""
    is_power = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (key_dim, value_dim))
    return is_power and key_dim * value_dim <= MAX_STATE
