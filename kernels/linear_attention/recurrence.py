"""The recurrent form of the gated delta rule on a GPU, with the gated norm. The formula is in gated_delta_net.py.

It computes sequences with few tokens in a step, such as decodes, and in batch-invariant mode all tokens. Each token is
computed by the same instructions, whatever else the step contains. A program computes one value head of one sequence
with its state [key_dim, value_dim] in registers, which is read and written once. It also replaces the convolution's
window of its channels. It skips sequences with MIN_CHUNKED tokens or more, which chunks.py computes; with MIN_CHUNKED 0
it skips none. Outputs of padding tokens are zeros.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.linear_attention.convolution import _update_window


def pick_warps(key_dim: int, value_dim: int) -> int:
    """Warps of a program: each thread has at most 64 elements of the state."""
    return max(1, min(8, key_dim * value_dim // 2048))


class DeltaNetWeights(NamedTuple):
    """float32: rates (-exp(a_log)) [value_heads], biases (dt_bias) [value_heads] or [value_heads, key_dim], scales (the
    norm's weight) [value_dim]. gated_delta_net.py explains the others."""

    rates: Tensor
    biases: Tensor
    scales: Tensor
    key_heads: int
    conv_size: int
    eps: float
    beta_scale: float
    has_channel_decays: bool
    has_sigmoid_gate: bool


def compute_tokens(
    weights: DeltaNetWeights, y: Tensor, qkvz: Tensor, ba: Tensor, window: Tensor, matrix: Tensor, rows: StateRows,
    out: Tensor, *, min_chunked: int,
) -> None:  # fmt: skip
    """Write the outputs, states and windows of all sequences with fewer than `min_chunked` tokens, of all if it is 0.

    y: output of the convolution. out: [T, value_heads * value_dim], contiguous. gated_delta_net.py explains the others.
    """
    heads, key_dim, value_dim = matrix.shape[1:]
    _compute_tokens[(rows.slots.shape[0], heads)](
        y, qkvz, ba, weights.rates, weights.biases, weights.scales, window, matrix, rows.slots, rows.seq_lens,
        rows.cu_seqlens, out, qkvz.stride(0), ba.stride(0), weights.eps,
        HEADS=heads, KEY_HEADS=weights.key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, SIZE=weights.conv_size,
        ROWS=triton.next_power_of_2(max(1, weights.conv_size - 1)), MIN_CHUNKED=min_chunked,
        BETA_SCALE=weights.beta_scale, CHANNEL_DECAYS=weights.has_channel_decays, SIGMOID=weights.has_sigmoid_gate,
        num_warps=pick_warps(key_dim, value_dim),
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens"])
def _compute_tokens(
    y, qkvz, ba, rates, biases, scales, window, matrix, slots, seq_lens, cu_seqlens, out, qkvz_stride, ba_stride, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, MIN_CHUNKED: tl.constexpr,
    BETA_SCALE: tl.constexpr, CHANNEL_DECAYS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    element = out.dtype.element_ty
    k_at, v_at = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    outputs = out + first.to(tl.int64) * HEADS * VALUE_DIM + head * VALUE_DIM + v_at
    if length == 0:
        for _ in range(count):
            tl.store(outputs, tl.zeros((VALUE_DIM,), element))
            outputs += HEADS * VALUE_DIM
    elif (count > 0) & ((MIN_CHUNKED == 0) | (count < MIN_CHUNKED)):
        group: tl.constexpr = HEADS // KEY_HEADS
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
        slot = tl.load(slots + sequence)
        q_at = head // group * KEY_DIM + k_at
        value_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v_at
        places = matrix + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + k_at[:, None] * VALUE_DIM + v_at[None, :]
        state = tl.load(places, length != count, other=0.0)
        rate = tl.load(rates + head)
        bias = tl.load(biases + head * KEY_DIM + k_at) if CHANNEL_DECAYS else tl.load(biases + head)
        scale = tl.load(scales + v_at)
        row = first.to(tl.int64)
        for _ in range(count):
            q = _normalised(tl.load(y + row * channels + q_at)) * (KEY_DIM**-0.5)
            k = _normalised(tl.load(y + row * channels + KEY_HEADS * KEY_DIM + q_at))
            v = tl.load(y + row * channels + value_at).to(tl.float32)
            a = ba + row * ba_stride + HEADS
            if CHANNEL_DECAYS:
                state *= tl.exp(_log_decay(a + head * KEY_DIM + k_at, rate, bias, True))[:, None]
            else:
                state *= tl.exp(_log_decay(a + head, rate, bias, True))
            beta = _beta(ba + row * ba_stride + head, True)
            if BETA_SCALE != 1:
                beta *= BETA_SCALE
            delta = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * delta[None, :]
            o = tl.sum(state * q[:, None], 0).to(element).to(tl.float32)
            o = o / tl.sqrt(tl.sum(o * o, 0) / VALUE_DIM + eps)
            z = tl.load(qkvz + row * qkvz_stride + channels + head * VALUE_DIM + v_at).to(tl.float32)
            if SIGMOID:
                o = scale * o * (1 / (1 + tl.exp(-z)))
            else:
                o = (scale * o.to(element).to(tl.float32)).to(element).to(tl.float32) * (z / (1 + tl.exp(-z)))
            tl.store(outputs, o.to(element))
            outputs += HEADS * VALUE_DIM
            row += 1
        tl.store(places, state)
        is_new = length == count
        _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, value_at, SIZE, ROWS)
        if head % group == 0:
            _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, q_at, SIZE, ROWS)
            k_channel = KEY_HEADS * KEY_DIM + q_at
            _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, k_channel, SIZE, ROWS)


@triton.jit
def _normalised(x):
    """x / |x| over the last dimension, in float32."""
    x = x.to(tl.float32)
    squares = tl.sum(x * x, len(x.shape) - 1, keep_dims=True)
    return x / tl.sqrt(squares + 1e-6)


@triton.jit
def _log_decay(a, rate, bias, mask):
    """The log decays of the tokens, rate * softplus(a + bias). `a`: pointers. Masked tokens are computed with a = 0."""
    return rate * _softplus(tl.load(a, mask, other=0.0).to(tl.float32) + bias)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact for small exp(x). The last line keeps a NaN, which tl.minimum drops."""
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1 + e
    softplus = tl.where(one == 1, e, tl.log(one) * (e / tl.maximum(one - 1, 1e-30)))
    return tl.where(x <= 20, softplus, x)


@triton.jit
def _beta(b, mask):
    """sigmoid(b) of the tokens, rounded to the dtype. `b`: pointers."""
    x = tl.load(b, mask, other=0.0)
    return (1 / (1 + tl.exp(-x.to(tl.float32)))).to(x.dtype).to(tl.float32)
