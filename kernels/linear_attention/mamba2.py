"""A Mamba-2 mixer between its projections: convolution, state space, gated norm (Dao and Gu, 2024, 2405.21060).

For each token, whose row has the columns z (the gate), [x | B | C] and dt, per head with the B and C of its group:

    x, B, C = silu(convolution of [x | B | C])              each channel by itself, rounded to the dtype
    d = clamp(softplus(dt + dt_bias), dt_limits)            this and what follows: float32
    S = exp(-exp(a_log) * d) * S + (d * x) B^T              S [head_dim, state_size]
    y = S C + skip * x
    out = norm_weight * norm(y * silu(z))                   norm: y / sqrt(mean y^2 + eps), in each of its groups

With `norm_before_gate`, out = norm_weight * norm(y) * silu(z). Without a norm, out = y * silu(z). Without a gate,
out = y.

Shapes, with inner = heads * head_dim and channels = inner + 2 * groups * state_size: rows [T, inner + channels + heads]
with columns z, x, B, C and dt; rows may be strided; out [T, inner].

Implementations: C (csrc/mamba2.c), torch, and for GPUs mamba2_recurrence.py and mamba2_chunks.py. All but
mamba2_chunks.py compute the tokens of a sequence in order. So their bits depend neither on how prefill is chunked nor
on other sequences. mamba2_chunks.py computes prompts in bfloat16 and float16 by matrix products, unless
`batch_invariant`. On a GPU y is rounded to the dtype before the gate and the norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, check_shape, once_per_geometry, refuse
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED, takes_chunks
from coatcheck.kernels.linear_attention.convolution import convolve
from coatcheck.kernels.linear_attention.mamba2_chunks import pick_scan, scan_sequences
from coatcheck.kernels.linear_attention.mamba2_recurrence import Mamba2Weights, gate_and_norm, step_sequences
from coatcheck.kernels.linear_attention.short_conv import Convolution
from coatcheck.kernels.linear_attention.state_sizes import takes_state_size


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """RMSNorm with a gate. weight: [inner], in the model's dtype. `groups`: into how many groups a row is cut; each has
    its own mean square. `norm_before_gate`: the gate multiplies the norm's output, not its input."""

    weight: Tensor
    eps: float
    groups: int
    norm_before_gate: bool


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """a_log, dt_bias and skip (D in the paper): [heads]. `dt_limits`: the smallest and the largest d, at least 0.

    `batch_invariant`: on a GPU a token's bits do not depend on the rest of its step. `has_gate`: if False, out = y, and
    the columns z have no effect; only without a norm. Raises LaunchRefused.
    """

    conv: Convolution
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: GatedNorm | None
    dt_limits: tuple[float, float]
    groups: int
    head_dim: int
    state_size: int
    batch_invariant: bool = False
    has_gate: bool = True
    # What the kernels read, all float32: -exp(a_log), dt_bias, skip and the norm's weight.
    _rates: Tensor = field(init=False)
    _biases: Tensor = field(init=False)
    _skips: Tensor = field(init=False)
    _scales: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        check_shape("dt_bias", self.dt_bias, (self.heads,))
        check_shape("skip", self.skip, (self.heads,))
        if self.heads % self.groups:
            refuse("a_log", f"a multiple of {self.groups} heads", self.heads)
        if self.conv.channels != self.inner + 2 * self.groups * self.state_size:
            refuse("conv", "a channel for each element of x, B and C", self.conv.channels)
        if self.norm is not None:
            if not self.has_gate:
                refuse("norm", "none without a gate", "a norm")
            check_shape("norm", self.norm.weight, (self.inner,))
            if self.inner % self.norm.groups:
                refuse("norm", f"a multiple of {self.norm.groups} elements", self.inner)
        for name, tensor in (
            ("_rates", -self.a_log.detach().float().exp()),
            ("_biases", self.dt_bias.detach().float()),
            ("_skips", self.skip.detach().float()),
            ("_scales", None if self.norm is None else self.norm.weight.detach().float()),
        ):
            object.__setattr__(self, name, None if tensor is None else tensor.contiguous())

    @property
    def heads(self) -> int:
        return self.a_log.shape[0]

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def norm_size(self) -> int:
        """Elements of a group of the norm; 0 without a norm."""
        return 0 if self.norm is None else self.inner // self.norm.groups

    @property
    def fits_native(self) -> bool:
        """Whether the C form computes these sizes: channels, state_size and a norm group are multiples of 16."""
        sizes = (self.state_size, self.norm_size or self.inner)
        return self.conv.fits_native and all(size % 16 == 0 for size in sizes)

    @property
    def weights(self) -> Mamba2Weights:
        """The weights as the GPU kernels read them."""
        before_gate, eps = (False, 0.0) if self.norm is None else (self.norm.norm_before_gate, self.norm.eps)
        return Mamba2Weights(
            self._rates, self._biases, self._skips, self._scales, self.groups, self.conv.weight.shape[1],
            self.dt_limits, self.norm_size, before_gate, eps,
        )  # fmt: skip

    def __call__(self, projected: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out. Replaces the states in the slots of `rows`. Raises LaunchRefused."""
        _check(projected, self.inner + self.conv.channels + self.heads)
        rows.check(projected.device)
        state.check_shapes(self.conv.window, (self.heads, self.head_dim, self.state_size), projected)
        assert state.matrix is not None
        if uses_triton(projected) and takes_state_size(self.state_size):
            return self._launch(projected, state, rows)
        library = native.library_for(projected)
        if library is None or not self.fits_native:
            return self.reference(projected, state, rows)
        tokens, weights = projected.shape[0], self.weights
        out = projected.new_empty((tokens, self.inner))
        inputs = out.new_empty((tokens, self.conv.channels), dtype=torch.float32)
        # y. The kernel leaves out the rows of padding, which it sets to zeros in `out`.
        make_sums = out.new_empty if self.has_gate else out.new_zeros
        sums = make_sums((tokens, self.inner), dtype=torch.float32)
        library.mamba2(
            native.MAMBA2.pack(
                *self.conv.arguments(state, rows, tokens), projected.data_ptr(), self._rates.data_ptr(),
                self._biases.data_ptr(), self._skips.data_ptr(),
                0 if self._scales is None else self._scales.data_ptr(), state.matrix.data_ptr(), inputs.data_ptr(),
                sums.data_ptr(), out.data_ptr(), projected.stride(0), self.heads, self.head_dim, self.groups,
                self.state_size, weights.norm_size, weights.norm_before_gate, *self.dt_limits, weights.eps, 0.0,
            )
        )  # fmt: skip
        return out if self.has_gate else sums.to(out.dtype)

    def _launch(self, projected: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out on a GPU. mamba2_recurrence.py computes sequences with few tokens, mamba2_chunks.py the others."""
        out, weights = projected.new_empty((projected.shape[0], self.inner)), self.weights
        if not len(out) or not len(rows.slots):
            return out
        min_chunked = MIN_CHUNKED if takes_chunks(projected.dtype, batch_invariant=self.batch_invariant) else 0
        xbc = projected[:, self.inner : self.inner + self.conv.channels]
        y = convolve(xbc, self.conv.taps, self.conv.biases, state.window, rows, batch_invariant=self.batch_invariant)
        assert state.matrix is not None
        inputs = (weights, y, projected, state.window, state.matrix, rows, out)
        step_sequences(*inputs, min_chunked=min_chunked)
        if min_chunked and rows.max_query_len >= min_chunked:
            scan_sequences(*inputs, pick_scan(self.head_dim, self.state_size, gpu_properties(projected.device)))
        if self.has_gate:
            gate_and_norm(weights, projected, out)
        return out

    def reference(self, projected: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """The formula in torch, token by token."""
        out = projected.new_zeros((projected.shape[0], self.inner))
        for part, slot, is_new in rows.sequences():
            if is_new:
                for tensor in state.tensors:
                    tensor[slot].zero_()
            out[part] = self._compute_sequence(projected[part], state, slot)
        return out

    def _compute_sequence(self, projected: Tensor, state: RecurrentState, slot: int) -> Tensor:
        assert state.matrix is not None
        dtype, count, heads = projected.dtype, projected.shape[0], self.heads
        gate, xbc, dt = projected.split_with_sizes((self.inner, self.conv.channels, heads), dim=1)
        xbc = F.silu(self.conv.reference(xbc, state.window[slot])).float()
        columns = self.groups * self.state_size
        x, b, c = xbc.split_with_sizes((self.inner, columns, columns), dim=1)
        x = x.view(count, heads, self.head_dim)
        b, c = (
            part.view(count, self.groups, self.state_size).repeat_interleave(heads // self.groups, 1) for part in (b, c)
        )
        dts = F.softplus(dt.float() + self._biases).clamp(*self.dt_limits)
        decays = (dts * self._rates).exp()
        matrix = state.matrix[slot]
        outs = []
        for t in range(count):
            matrix = matrix * decays[t, :, None, None] + (dts[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
            outs.append((matrix * c[t, :, None, :]).sum(2) + self._skips[:, None] * x[t])
        state.matrix[slot] = matrix
        return self._norm_and_gate(torch.stack(outs).view(count, self.inner), F.silu(gate.float())).to(dtype)

    def _norm_and_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        norm = self.norm
        if not self.has_gate:
            return y
        if norm is None:
            return y * gate
        grouped = (y if norm.norm_before_gate else y * gate).unflatten(1, (norm.groups, -1))
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + norm.eps)
        y = normed.flatten(1).to(norm.weight.dtype).float() * norm.weight.float()
        return y * gate if norm.norm_before_gate else y


@once_per_geometry
def _check(projected: Tensor, columns: int) -> None:
    check_shape("projected", projected, (None, columns))
    check_dtype("projected", projected, *FLOATS)
    check_rows("projected", projected)
