"""The head sizes that the GPU kernels for gated delta nets and Mamba-2 compute.

This module does not import torch, because `coatcheck serve` checks the sizes before a rank starts.
"""

from typing import Final

# The most elements of a head's state: a program of 8 warps keeps them in registers.
MAX_STATE: Final = 128 * 128
# The largest state_size of a Mamba-2 mixer: a program multiplies by all of B and C of a token.
MAX_STATE_SIZE: Final = 256


def fits_gpu(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels compute heads of these sizes: powers of two, at least 16, with a product of at most
    MAX_STATE."""
    is_power = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (key_dim, value_dim))
    return is_power and key_dim * value_dim <= MAX_STATE


def takes_state_size(state_size: int) -> bool:
    """Whether the kernels compute Mamba-2 mixers with this state size: a power of two from 16 to MAX_STATE_SIZE."""
    return 16 <= state_size <= MAX_STATE_SIZE and state_size & (state_size - 1) == 0
