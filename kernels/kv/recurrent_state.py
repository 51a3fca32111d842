"""RecurrentState: one layer's states of all sequences, in slots of fixed size. vLLM's conv_state and ssm_state.

    window [slots, conv_size - 1, channels]   the last inputs of the convolution, oldest first
    matrix [slots, heads, rows, columns]      the state of the recurrence; float32, because it sums over all tokens

A layer without a recurrence (LFM2's gated convolution) has no matrix.

A sequence starts from a state of zeros, whatever its slot contains. So slots are never cleared.
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
        """The window and, if there is one, the matrix: contiguous, [slots, ...] each."""
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
        """Copy slots: (source, target) pairs. No slot may be both a source and a target."""
        for source, target in pairs:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step and their slots: T tokens of S sequences, flattened.

    slots:      int64 [S], the slot of each sequence; all different except those of padding
    seq_lens:   int32 [S], tokens of the sequence, including this step's; 0 for padding, whose outputs are 0
    cu_seqlens: int32 [S + 1], sequence s has tokens [cu_seqlens[s], cu_seqlens[s + 1])
    max_query_len: an upper bound on a sequence's tokens in this step; chooses the kernels of a GPU

    If all seq_lens[s] tokens of a sequence are in this step, it starts from a state of zeros.
    """

    slots: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    max_query_len: int = sys.maxsize

    def sequences(self) -> Iterator[tuple[slice, int, bool]]:
        """(its tokens in the step, slot, whether it starts from zeros) of each sequence with tokens, without padding.
        Waits for the device."""
        starts = self.cu_seqlens.tolist()
        for index, (slot, length) in enumerate(zip(self.slots.tolist(), self.seq_lens.tolist(), strict=True)):
            first, last = starts[index], starts[index + 1]
            if length and first < last:
                yield slice(first, last), slot, length == last - first

    def check(self, device: torch.device) -> None:
        """Raise LaunchRefused unless shapes, dtypes and devices are those above."""
        count = self.slots.shape[0]
        check_dense("slots", self.slots, (None,), torch.int64, device)
        check_dense("seq_lens", self.seq_lens, (count,), torch.int32, device)
        check_dense("cu_seqlens", self.cu_seqlens, (count + 1,), torch.int32, device)
