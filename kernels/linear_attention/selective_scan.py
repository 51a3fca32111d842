"""The convolution and the selective scan of a Mamba mixer (Gu and Dao, 2023, 2312.00752), between its projections.

Each channel by itself, for each token:

    x = silu(convolution of x)                                  rounded to the dtype
    d = softplus(dt + dt_bias)                                  this and what follows: float32
    S = exp(-exp(a_log) * d) * S + d * x * B                    S, a_log, B and C: [state_size]
    out = (S C + skip * x) * silu(z)

dt, B and C are projections of x, which the caller computes between `convolve` and `scan`. All channels share B and C.

Shapes: x, dt, z and out [T, channels], B and C one behind the other in rows [T, 2 * state_size]. Rows may be strided.
The state's matrix has groups of 16 channels: [channels / 16, state_size, 16]. A number of channels that 16 does not
divide has smaller groups.

Implementations: C (csrc/selective_scan.c) and torch. Both compute the tokens of a sequence in order. So their bits
depend neither on how prefill is chunked nor on other sequences. There is no kernel for GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, check_shape, once_per_geometry, refuse
from coatcheck.kernels.linear_attention.short_conv import Convolution
from coatcheck.kernels.linear_attention.state_sizes import MAX_STATE_SIZE, scan_matrix_shape


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    """a_log: [channels, state_size]. dt_bias and skip (D in the paper): [channels]. Raises LaunchRefused."""

    conv: Convolution
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    # What the kernels read, all float32: -exp(a_log) / ln(2) in the layout of a matrix, dt_bias and skip.
    _rates: Tensor = field(init=False)
    _biases: Tensor = field(init=False)
    _skips: Tensor = field(init=False)

    def __post_init__(self) -> None:
        check_shape("a_log", self.a_log, (self.conv.channels, None))
        check_shape("dt_bias", self.dt_bias, (self.conv.channels,))
        check_shape("skip", self.skip, (self.conv.channels,))
        rates = -self.a_log.detach().float().exp() / math.log(2)
        groups, size, lanes = self.matrix
        rates = rates.view(groups, lanes, size).transpose(1, 2)
        for name, tensor in (
            ("_rates", rates),
            ("_biases", self.dt_bias.detach().float()),
            ("_skips", self.skip.detach().float()),
        ):
            object.__setattr__(self, name, tensor.contiguous())

    @property
    def state_size(self) -> int:
        return self.a_log.shape[1]

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Shape of a slot's matrix: (groups, state_size, channels of a group)."""
        return scan_matrix_shape(self.conv.channels, self.state_size)

    @property
    def fits_native(self) -> bool:
        """Whether the C form computes these sizes: the channels are a multiple of 16, the state_size at most
        MAX_STATE_SIZE."""
        return self.conv.fits_native and self.state_size <= MAX_STATE_SIZE

    def convolve(self, x: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """silu(convolution of x), [T, channels]. Replaces the windows in the slots of `rows`. Raises LaunchRefused."""
        _check_input(x, self.conv.channels)
        self._check_state(x, state, rows)
        library = native.library_for(x)
        if library is None or not self.fits_native:
            return self.convolve_reference(x, state, rows)
        out = x.new_empty((x.shape[0], self.conv.channels))
        library.silu_conv(
            native.SHORT_CONV.pack(
                *self.conv.arguments(state, rows, x.shape[0]), x.data_ptr(), out.data_ptr(), x.stride(0)
            )
        )
        return out

    def scan(self, x: Tensor, dt: Tensor, bc: Tensor, gate: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out. `x`: what `convolve` returned. `dt`: without its bias. Replaces the matrices in the slots of `rows`.
        Raises LaunchRefused."""
        _check_scan(x, dt, bc, gate, self.conv.channels, self.state_size)
        self._check_state(x, state, rows)
        library = native.library_for(x)
        if library is None or not self.fits_native:
            return self.scan_reference(x, dt, bc, gate, state, rows)
        assert state.matrix is not None
        out = torch.empty_like(x)
        library.selective_scan(
            native.SELECTIVE_SCAN.pack(
                x.data_ptr(), dt.data_ptr(), bc.data_ptr(), gate.data_ptr(), self._rates.data_ptr(),
                self._biases.data_ptr(), self._skips.data_ptr(), state.matrix.data_ptr(), rows.slots.data_ptr(),
                rows.seq_lens.data_ptr(), rows.cu_seqlens.data_ptr(), out.data_ptr(), dt.stride(0), bc.stride(0),
                gate.stride(0), rows.slots.shape[0], x.shape[0], self.conv.channels, self.state_size,
                native.TYPES[x.dtype],
            )
        )  # fmt: skip
        return out

    def convolve_reference(self, x: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """The formula of `convolve` in torch."""
        out = x.new_zeros((x.shape[0], self.conv.channels))
        for part, slot, is_new in rows.sequences():
            if is_new:
                state.window[slot].zero_()
            out[part] = F.silu(self.conv.reference(x[part], state.window[slot]))
        return out

    def scan_reference(
        self, x: Tensor, dt: Tensor, bc: Tensor, gate: Tensor, state: RecurrentState, rows: StateRows
    ) -> Tensor:
        """The formula of `scan` in torch, token by token."""
        assert state.matrix is not None
        out = torch.zeros_like(x)
        groups, _, lanes = self.matrix
        steps = F.softplus(dt.float() + self._biases)
        for part, slot, is_new in rows.sequences():
            if is_new:
                state.matrix[slot].zero_()
            matrix, outs = state.matrix[slot], []
            inputs = x[part].float()
            b, c = bc[part].float().chunk(2, dim=1)
            for t, step in enumerate(steps[part]):
                own, added = (row.view(groups, 1, lanes) for row in (step, step * inputs[t]))
                matrix = matrix * (self._rates * own).exp2() + added * b[t, :, None]
                outs.append((matrix * c[t, :, None]).sum(1).flatten() + self._skips * inputs[t])
            state.matrix[slot] = matrix
            out[part] = (torch.stack(outs) * F.silu(gate[part].float())).to(x.dtype)
        return out

    def _check_state(self, x: Tensor, state: RecurrentState, rows: StateRows) -> None:
        rows.check(x.device)
        state.check_shapes(self.conv.window, self.matrix, x)


@once_per_geometry
def _check_input(x: Tensor, channels: int) -> None:
    check_shape("x", x, (None, channels))
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)


@once_per_geometry
def _check_scan(x: Tensor, dt: Tensor, bc: Tensor, gate: Tensor, channels: int, state_size: int) -> None:
    tokens = x.shape[0]
    for name, tensor, columns in (("x", x, channels), ("dt", dt, channels), ("bc", bc, 2 * state_size),
                                  ("gate", gate, channels)):  # fmt: skip
        check_shape(name, tensor, (tokens, columns))
        check_dtype(name, tensor, x.dtype)
        check_rows(name, tensor)
    check_dtype("x", x, *FLOATS)
    if not x.is_contiguous():
        refuse("x", "contiguous rows", f"strides {x.stride()}")
