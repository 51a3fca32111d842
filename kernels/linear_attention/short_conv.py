"""LFM2's gated short convolution between its projections, and the depthwise convolution that Mamba-2 shares.

For each token, with the columns b, c and x of its row, each channel by itself:

    u = b * x                                                     rounded to the dtype
    out = c * (bias + sum_j conv[j] * u[t - conv_size + 1 + j])   the sum rounded to the dtype

Shapes: rows [T, 3 * channels] with columns b, c and x; rows may be strided; out [T, channels]. The state's window holds
the last conv_size - 1 values of u.

Implementations: C (csrc/short_conv.c), torch, and for GPUs gated_convolution.py. All add the taps of a token in the
same order. So their bits depend neither on how prefill is chunked nor on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, check_shape, once_per_geometry, refuse
from coatcheck.kernels.linear_attention.gated_convolution import convolve_gated

_CHANNELS = 16  # the C form computes multiples of 16 channels


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """weight [channels, conv_size] and bias [channels] in the model's dtype: one filter for each channel.

    Raises LaunchRefused.
    """

    weight: Tensor
    bias: Tensor | None
    # weight and bias in float32, as the kernels read them: [conv_size, channels] and [channels].
    taps: Tensor = field(init=False)
    biases: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        check_shape("weight", self.weight, (None, None))
        if not 1 <= self.weight.shape[1] <= 8:
            refuse("weight", "1 to 8 taps", self.weight.shape[1])
        if self.bias is not None:
            check_shape("bias", self.bias, (self.channels,))
        object.__setattr__(self, "taps", self.weight.detach().float().t().contiguous())
        object.__setattr__(self, "biases", None if self.bias is None else self.bias.detach().float().contiguous())

    @property
    def channels(self) -> int:
        return self.weight.shape[0]

    @property
    def window(self) -> tuple[int, int]:
        """Shape of a slot's window: (conv_size - 1, channels)."""
        return self.weight.shape[1] - 1, self.channels

    @property
    def fits_native(self) -> bool:
        return self.channels % _CHANNELS == 0

    def arguments(self, state: RecurrentState, rows: StateRows, tokens: int) -> tuple[int, ...]:
        """The fields of the C struct Convolution."""
        return (
            self.taps.data_ptr(), 0 if self.biases is None else self.biases.data_ptr(), state.window.data_ptr(),
            rows.slots.data_ptr(), rows.seq_lens.data_ptr(), rows.cu_seqlens.data_ptr(),
            rows.slots.shape[0], tokens, self.channels, self.weight.shape[1], native.TYPES[state.window.dtype],
        )  # fmt: skip

    def reference(self, x: Tensor, window: Tensor) -> Tensor:
        """x [T, channels] of one sequence -> [T, channels], rounded to the dtype. Replaces `window`."""
        count, inputs = x.shape[0], torch.cat((window, x))
        window.copy_(inputs[count:])
        total = torch.zeros_like(x, dtype=torch.float32) if self.biases is None else self.biases.expand(count, -1)
        for tap in range(self.weight.shape[1]):
            total = total + inputs[tap : tap + count].float() * self.taps[tap]
        return total.to(x.dtype)


class ShortConv:
    """LFM2's operator. `conv`: the convolution of u = b * x. `batch_invariant`: on a GPU all steps have one launch."""

    def __init__(self, conv: Convolution, *, batch_invariant: bool = False) -> None:
        self.conv = conv
        self._batch_invariant = batch_invariant

    def __call__(self, bcx: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out. Replaces the states in the slots of `rows`. Raises LaunchRefused."""
        _check(bcx, self.conv.channels)
        rows.check(bcx.device)
        state.check_shapes(self.conv.window, None, bcx)
        if uses_triton(bcx):
            return convolve_gated(
                bcx, self.conv.taps, self.conv.biases, state.window, rows, batch_invariant=self._batch_invariant
            )
        library = native.library_for(bcx)
        if library is None or not self.conv.fits_native:
            return self.reference(bcx, state, rows)
        out = bcx.new_empty((bcx.shape[0], self.conv.channels))
        library.short_conv(
            native.SHORT_CONV.pack(
                *self.conv.arguments(state, rows, bcx.shape[0]), bcx.data_ptr(), out.data_ptr(), bcx.stride(0)
            )
        )
        return out

    def reference(self, bcx: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """The formula in torch."""
        out = bcx.new_zeros((bcx.shape[0], self.conv.channels))
        for part, slot, is_new in rows.sequences():
            if is_new:
                state.window[slot].zero_()
            b, c, x = bcx[part].chunk(3, dim=1)
            out[part] = c * self.conv.reference(b * x, state.window[slot])
        return out


@once_per_geometry
def _check(bcx: Tensor, channels: int) -> None:
    check_shape("bcx", bcx, (None, 3 * channels))
    check_dtype("bcx", bcx, *FLOATS)
    check_rows("bcx", bcx)
