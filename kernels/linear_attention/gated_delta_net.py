"""A gated delta net between its projections: convolution, gated delta rule, gated norm (Yang et al., 2024, 2412.06464).

For each token, with x = [q | k | v] of its row, per value head h with the q and k of its key head:

    y = silu(sum_j conv[j] * x[t - conv_size + 1 + j])                  each channel by itself, rounded to the dtype
    q, k = q / |q| / sqrt(key_dim), k / |k|                             float32, |x| = sqrt(sum x^2 + 1e-6)
    d = exp(-exp(a_log) * softplus(a + dt_bias)),  b' = beta_scale * sigmoid(b)
    S = d * S;  S = S + k (b' * (v - S^T k))^T;  o = S^T q              float32, S [key_dim, value_dim]
    out = norm_weight * (o / sqrt(mean o^2 + eps)) * silu(z)            or * sigmoid(z)

d is one number, or in Kimi Delta Attention (Kimi Team, 2025, 2510.26692) one for each row of S, a channel of the key.

Shapes: qkvz [T, channels + value_heads * value_dim] with columns q, k, v (channels) and z; ba [T, value_heads +
dt_bias.numel()] with columns b and a; out [T, value_heads * value_dim]. Rows of qkvz and ba may be strided.

Implementations: C (csrc/delta_net.c), torch, and for GPUs recurrence.py and chunks.py. All but chunks.py compute the
tokens of a sequence one after the other. So their bits depend neither on how prefill is chunked nor on other sequences.
chunks.py computes prompts in bfloat16 and float16 by matrix products, unless `batch_invariant`, and only nets with one
decay for each head, a beta_scale of 1 and silu(z).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import (
    FLOATS,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
    once_per_geometry,
    refuse,
)
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED, compute_chunks, pick_chunks, takes_chunks
from coatcheck.kernels.linear_attention.convolution import convolve
from coatcheck.kernels.linear_attention.recurrence import DeltaNetWeights, compute_tokens
from coatcheck.kernels.linear_attention.state_sizes import fits_gpu, fits_native

_NORM_EPS = 1e-6  # added to the squared length of q and of k


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """conv [channels, conv_size] and norm [value_dim] in the model's dtype, a_log [value_heads], dt_bias [value_heads],
    or [value_heads, key_dim] for a decay of each channel.

    `eps`: epsilon of the gated norm. `beta_scale`: 2 gives betas of up to 2, with which a token may negate what the
    state holds for its key (negative eigenvalues). `has_sigmoid_gate`: the gate is sigmoid(z), and only its product
    with the norm is rounded. `batch_invariant`: on a GPU a token's bits do not depend on the rest of its step. Raises
    LaunchRefused.
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    key_dim: int
    batch_invariant: bool = False
    beta_scale: float = 1.0
    has_sigmoid_gate: bool = False
    # What the kernels read, all float32: conv as [conv_size, channels], -exp(a_log), dt_bias and norm.
    _taps: Tensor = field(init=False)
    _rates: Tensor = field(init=False)
    _biases: Tensor = field(init=False)
    _scales: Tensor = field(init=False)

    def __post_init__(self) -> None:
        heads, channels = self.a_log.shape[0], self.conv.shape[0]
        check_shape("conv", self.conv, (None, None))
        check_shape("dt_bias", self.dt_bias, (heads, self.key_dim) if self.has_channel_decays else (heads,))
        check_shape("norm", self.norm, (None,))
        if not 1 <= self.conv.shape[1] <= 8:
            refuse("conv", "1 to 8 taps", self.conv.shape[1])
        if heads % self.key_heads:
            refuse("a_log", f"a multiple of {self.key_heads} value heads", heads)
        if channels != 2 * self.key_heads * self.key_dim + heads * self.value_dim:
            refuse("conv", "a channel for each element of q, k and v", channels)
        for name, tensor in (
            ("_taps", self.conv.detach().float().t()),
            ("_rates", -self.a_log.detach().float().exp()),
            ("_biases", self.dt_bias.detach().float()),
            ("_scales", self.norm.detach().float()),
        ):
            object.__setattr__(self, name, tensor.contiguous())

    @property
    def value_heads(self) -> int:
        return self.a_log.shape[0]

    @property
    def value_dim(self) -> int:
        return self.norm.shape[0]

    @property
    def channels(self) -> int:
        return self.conv.shape[0]

    @property
    def has_channel_decays(self) -> bool:
        return self.dt_bias.dim() == 2

    @property
    def is_plain(self) -> bool:
        """Whether chunks.py computes such a net."""
        return self.beta_scale == 1 and not self.has_channel_decays and not self.has_sigmoid_gate

    @property
    def weights(self) -> DeltaNetWeights:
        """The weights as the GPU kernels read them."""
        return DeltaNetWeights(
            self._rates,
            self._biases,
            self._scales,
            self.key_heads,
            self.conv.shape[1],
            self.eps,
            self.beta_scale,
            has_channel_decays=self.has_channel_decays,
            has_sigmoid_gate=self.has_sigmoid_gate,
        )

    def __call__(self, qkvz: Tensor, ba: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out. Replaces the states in the slots of `rows`. Raises LaunchRefused."""
        _check(qkvz, ba, self.channels, self.value_heads, self.value_dim, self.dt_bias.numel())
        rows.check(qkvz.device)
        window, matrix = (self.conv.shape[1] - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)
        state.check_shapes(window, matrix, qkvz)
        assert state.matrix is not None
        if uses_triton(qkvz) and fits_gpu(self.key_dim, self.value_dim):
            return self._launch(qkvz, ba, state, rows)
        library = native.library_for(qkvz)
        if library is None or not fits_native(self.key_dim, self.value_dim):
            return self.reference(qkvz, ba, state, rows)
        out = qkvz.new_empty((qkvz.shape[0], self.value_heads * self.value_dim))
        library.gated_delta_net(
            native.GATED_DELTA_NET.pack(
                qkvz.data_ptr(), ba.data_ptr(), self._taps.data_ptr(), self._rates.data_ptr(), self._biases.data_ptr(),
                self._scales.data_ptr(), state.window.data_ptr(), state.matrix.data_ptr(), rows.slots.data_ptr(),
                rows.seq_lens.data_ptr(), rows.cu_seqlens.data_ptr(), out.data_ptr(),
                qkvz.stride(0), ba.stride(0), rows.slots.shape[0], qkvz.shape[0], self.key_heads, self.value_heads,
                self.key_dim, self.value_dim, self.conv.shape[1], native.TYPES[qkvz.dtype], self.channels,
                self.has_channel_decays, self.has_sigmoid_gate, self.eps, self.beta_scale,
            )
        )  # fmt: skip
        return out

    def _launch(self, qkvz: Tensor, ba: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """out on a GPU. recurrence.py computes sequences with few tokens, chunks.py the others."""
        out = qkvz.new_empty((qkvz.shape[0], self.value_heads * self.value_dim))
        if not len(out) or not len(rows.slots):
            return out
        has_chunks = self.is_plain and takes_chunks(qkvz.dtype, batch_invariant=self.batch_invariant)
        min_chunked = MIN_CHUNKED if has_chunks else 0
        y = convolve(qkvz, self._taps, None, state.window, rows, batch_invariant=self.batch_invariant)
        assert state.matrix is not None
        inputs = (self.weights, y, qkvz, ba, state.window, state.matrix, rows, out)
        compute_tokens(*inputs, min_chunked=min_chunked)
        if min_chunked and rows.max_query_len >= min_chunked:
            compute_chunks(*inputs, pick_chunks(self.value_dim, gpu_properties(qkvz.device)))
        return out

    def reference(self, qkvz: Tensor, ba: Tensor, state: RecurrentState, rows: StateRows) -> Tensor:
        """The formula in torch, token by token."""
        out = qkvz.new_zeros((qkvz.shape[0], self.value_heads * self.value_dim))
        for part, slot, is_new in rows.sequences():
            out[part] = self._compute_sequence(qkvz[part], ba[part], state, slot, is_new=is_new)
        return out

    def _compute_sequence(self, qkvz: Tensor, ba: Tensor, state: RecurrentState, slot: int, *, is_new: bool) -> Tensor:
        assert state.matrix is not None
        dtype, count, taps = qkvz.dtype, qkvz.shape[0], self.conv.shape[1]
        heads, value_dim = self.value_heads, self.value_dim
        if is_new:
            state.window[slot].zero_()
            state.matrix[slot].zero_()
        x, z = qkvz.split_with_sizes((self.channels, heads * value_dim), dim=1)
        inputs = torch.cat((state.window[slot], x))
        state.window[slot] = inputs[count:]
        y = sum(inputs[tap : tap + count].float() * self._taps[tap] for tap in range(taps))
        assert isinstance(y, Tensor)
        y = F.silu(y.to(dtype)).float()
        keys = self.key_heads * self.key_dim
        q, k, v = y.split_with_sizes((keys, keys, heads * value_dim), dim=1)
        q, k = (
            _normalise(part.view(count, self.key_heads, self.key_dim)).repeat_interleave(heads // self.key_heads, 1)
            for part in (q, k)
        )
        q = q * self.key_dim**-0.5
        v = v.view(count, heads, value_dim)
        b, a = ba.split_with_sizes((heads, self.dt_bias.numel()), dim=1)
        # [T, heads, key_dim or 1]
        decay = (
            self._rates[:, None] * F.softplus(a.float().view(count, heads, -1) + self._biases.view(heads, -1))
        ).exp()
        beta = self.beta_scale * b.sigmoid().float()
        matrix = state.matrix[slot]
        outs = []
        for t in range(count):
            matrix = matrix * decay[t, :, :, None]
            delta = beta[t, :, None] * (v[t] - (matrix * k[t, :, :, None]).sum(1))
            matrix = matrix + k[t, :, :, None] * delta[:, None, :]
            outs.append((matrix * q[t, :, :, None]).sum(1))
        state.matrix[slot] = matrix
        core = torch.stack(outs).to(dtype).float()
        normed = core * torch.rsqrt(core.pow(2).mean(-1, keepdim=True) + self.eps)
        z = z.float().view(count, heads, value_dim)
        if self.has_sigmoid_gate:
            return (self._scales * normed * z.sigmoid()).to(dtype).flatten(1)
        return ((self.norm * normed.to(dtype)).float() * F.silu(z)).to(dtype).flatten(1)


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _NORM_EPS)


@once_per_geometry
def _check(qkvz: Tensor, ba: Tensor, channels: int, value_heads: int, value_dim: int, decays: int) -> None:
    check_shape("qkvz", qkvz, (None, channels + value_heads * value_dim))
    check_dtype("qkvz", qkvz, *FLOATS)
    check_rows("qkvz", qkvz)
    check_shape("ba", ba, (qkvz.shape[0], value_heads + decays))
    check_dtype("ba", ba, qkvz.dtype)
    check_device("ba", ba, qkvz.device)
    check_rows("ba", ba)
