"""RecurrentState: what one gated delta net remembers of each sequence, in slots of fixed size.

    window [slots, conv_size - 1, channels]              the last inputs of the convolution, oldest first
    matrix [slots, value_heads, key_dim, value_dim]      float32: sums over all tokens round too much in 16 bits

A sequence whose next token is its first one starts from zeros, whatever its slot holds. So nobody has to clear a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, check_shape, refuse


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """`window` has the model's dtype."""

    window: Tensor
    matrix: Tensor

    def __post_init__(self) -> None:
        check_shape("window", self.window, (None, None, None))
        check_dtype("window", self.window, *FLOATS)
        check_dense("matrix", self.matrix, (self.window.shape[0], None, None, None), torch.float32, self.window.device)
        if not self.window.is_contiguous():
            refuse("window", "a contiguous tensor", f"strides {self.window.stride()}")


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which tokens of a step belong to which slot: T tokens of S sequences, flattened.

    slots:      int64 [S], the slot of each sequence; no two sequences of a step have the same
    seq_lens:   int32 [S], tokens of the sequence with this step's; 0 for padding, whose outputs are 0
    cu_seqlens: int32 [S + 1], sequence s owns tokens cu_seqlens[s] to cu_seqlens[s + 1]

    A sequence with seq_lens[s] tokens of which this step computes as many starts from a zero state.
    """

    slots: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor

    def check(self, device: torch.device) -> None:
        """Raise LaunchRefused unless shapes, dtypes and devices fit."""
        count = self.slots.shape[0]
        check_dense("slots", self.slots, (None,), torch.int64, device)
        check_dense("seq_lens", self.seq_lens, (count,), torch.int32, device)
        check_dense("cu_seqlens", self.cu_seqlens, (count + 1,), torch.int32, device)
