"""The sizes of the states of gated delta nets and Mamba mixers that the kernels compute, and the shape of a scan's.

This module does not import torch, because `coatcheck serve` checks the sizes before a rank starts.
"""

import math
from typing import Final

# The most elements of a head's state on a GPU: a program of 8 warps keeps them in registers.
MAX_STATE: Final = 128 * 128
# The largest state_size of a Mamba or Mamba-2 mixer, and in C the largest key_dim and value_dim of a gated delta net.
# On a GPU a program multiplies by all of B and C of a token. The C library keeps rows of this length on the stack:
# MAX_DIM of csrc/delta_net.c and MAX_STATE_SIZE of csrc/recurrent.h.
MAX_STATE_SIZE: Final = 256
# Channels of a selective scan whose states lie together: GROUP of csrc/selective_scan.c.
_GROUP: Final = 16


def fits_gpu(key_dim: int, value_dim: int) -> bool:
    """Whether the GPU kernels compute delta nets with heads of these sizes: powers of two, at least 16, with a product
    of at most MAX_STATE."""
    is_power = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (key_dim, value_dim))
    return is_power and key_dim * value_dim <= MAX_STATE


def fits_native(key_dim: int, value_dim: int) -> bool:
    """Whether the C library computes delta nets with heads of these sizes: multiples of 16 up to MAX_STATE_SIZE."""
    return all(dim % 16 == 0 and dim <= MAX_STATE_SIZE for dim in (key_dim, value_dim))


def takes_state_size(state_size: int) -> bool:
    """Whether the GPU kernels compute Mamba-2 mixers with this state size: a power of two from 16 to MAX_STATE_SIZE."""
    return 16 <= state_size <= MAX_STATE_SIZE and state_size & (state_size - 1) == 0


def scan_matrix_shape(channels: int, state_size: int) -> tuple[int, int, int]:
    """Shape of a sequence's state of a selective scan: (groups, state_size, channels of a group)."""
    lanes = math.gcd(channels, _GROUP)
    return channels // lanes, state_size, lanes
