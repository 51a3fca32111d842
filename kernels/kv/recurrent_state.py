"""RecurrentState: what one layer remembers of each sequence, in slots of fixed size.

    window [slots, conv_size - 1, channels]   the last inputs of the convolution, oldest first
    matrix [slots, heads, rows, columns]      float32: sums over all tokens round too much in 16 bits

A layer without recurrence (LFM2's gated convolution) has no matrix.

A sequence whose next token is its first one starts from zeros, whatever its slot holds. So nobody has to clear a slot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels.launch_check import (
    FLOATS,
    check_dense,
    check_device,
    check_dtype,
    check_shape,
    refuse,
)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """`window` has the model's dtype. `matrix`: None for a layer without recurrence."""

    window: Tensor
    matrix: Tensor | None

    def __post_init__(self) -> None:
        check_shape("window", self.window, (None, None, None))
        check_dtype("window", self.window, *FLOATS)
        if self.matrix is not None:
            slots, device = self.window.shape[0], self.window.device
            check_dense("matrix", self.matrix, (slots, None, None, None), torch.float32, device)
        if not self.window.is_contiguous():
            refuse("window", "a contiguous tensor", f"strides {self.window.stride()}")

    @property
    def tensors(self) -> list[Tensor]:
        """What a slot holds: [slots, ...] each, contiguous."""
        return [self.window] if self.matrix is None else [self.window, self.matrix]

    def check_shapes(self, window: tuple[int, int], matrix: tuple[int, int, int] | None, like: Tensor) -> None:
        """Raise LaunchRefused unless a slot has these shapes, with the dtype and device of the rows `like`."""
        check_shape("window", self.window, (None, *window))
        check_dtype("window", self.window, like.dtype)
        check_device("window", self.window, like.device)
        if (self.matrix is None) != (matrix is None):
            refuse("matrix", "a state" if matrix else "none", "none" if matrix else "a state")
        if self.matrix is not None and matrix is not None:
            check_shape("matrix", self.matrix, (None, *matrix))

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy each pair's first slot to its second. No slot is both a source and a target."""
        for source, target in pairs:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which tokens of a step belong to which slot: T tokens of S sequences, flattened.

    slots:      int64 [S], the slot of each sequence; no two sequences of a step have the same
    seq_lens:   int32 [S], tokens of the sequence with this step's; 0 for padding, whose outputs are 0
    cu_seqlens: int32 [S + 1], sequence s owns tokens cu_seqlens[s] to cu_seqlens[s + 1]
    max_query_len: at least the tokens of each sequence in this step; chooses the kernels of a GPU

    A sequence with seq_lens[s] tokens of which this step computes as many starts from a zero state.
    """

    slots: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    max_query_len: int = sys.maxsize

    def sequences(self) -> Iterator[tuple[slice, int, bool]]:
        """(tokens, slot, whether they are the first ones) of each sequence that has some. Waits for the device."""
        starts = self.cu_seqlens.tolist()
        for index, (slot, length) in enumerate(zip(self.slots.tolist(), self.seq_lens.tolist(), strict=True)):
            first, last = starts[index], starts[index + 1]
            if length and first < last:
                yield slice(first, last), slot, length == last - first

    def check(self, device: torch.device) -> None:
        """Raise LaunchRefused unless shapes, dtypes and devices fit."""
        count = self.slots.shape[0]
        check_dense("slots", self.slots, (None,), torch.int64, device)
        check_dense("seq_lens", self.seq_lens, (count,), torch.int32, device)
        check_dense("cu_seqlens", self.cu_seqlens, (count + 1,), torch.int32, device)
