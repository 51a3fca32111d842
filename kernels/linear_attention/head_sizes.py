"""The sizes of heads that the kernels for gated delta nets compute on a GPU.

Without torch: `coatcheck serve` checks them before a rank starts.
"""

from typing import Final

# The most elements of a head's state: a program keeps them in the registers of 8 warps.
MAX_STATE: Final = 128 * 128


def fits_gpu(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels compute heads of these sizes: powers of two from 16 on, with at most MAX_STATE elements."""
    is_power = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (key_dim, value_dim))
    return is_power and key_dim * value_dim <= MAX_STATE
