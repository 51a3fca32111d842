"""The recurrent form of a Mamba-2 mixer on a GPU, and its gated norm. The formula is in mamba2.py.

`_step_heads` computes sequences with few tokens in a step, such as decodes, and in batch-invariant mode all tokens.
Each token is computed by the same instructions, whatever else the step contains. A program computes BLOCK rows of one
head's state [head_dim, state_size], which it keeps in registers; they are read and written once for each sequence. It
also replaces the convolution's window of its channels. It skips sequences with MIN_CHUNKED tokens or more, which
mamba2_chunks.py computes; with MIN_CHUNKED 0 it skips none. Outputs of padding tokens are zeros.

`_gate_and_norm` needs whole groups of y, so it runs last. y is rounded to the model's dtype before.

When a CUDA graph is replayed, a step has as many sequences as tokens, and most are empty. So a program takes every
SEQUENCES-th sequence, and ends at the first one that begins at the end of the step.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.linear_attention.convolution import _update_window
from coatcheck.kernels.linear_attention.recurrence import _softplus

_SEQUENCES = 128  # the most programs of one part of a head
_GATED_BLOCK = 1024  # elements of a program of the gate without a norm


class RecurrenceLaunch(NamedTuple):
    """`block`: rows of a head's state that a program computes."""

    block: int
    num_warps: int


def pick_recurrence(head_dim: int, state_size: int) -> RecurrenceLaunch:
    """At most 32 rows, so that few sequences fill a GPU too. Each thread has at most 32 elements of the state."""
    block = min(32, triton.next_power_of_2(head_dim))
    return RecurrenceLaunch(block, max(1, min(8, block * state_size // 1024)))


class GateLaunch(NamedTuple):
    """`size`: elements of a row whose mean square is taken, or that a program computes if there is no norm."""

    size: int
    num_warps: int

    @property
    def block(self) -> int:
        return int(triton.next_power_of_2(self.size))


def pick_gate(norm_size: int) -> GateLaunch:
    """`norm_size`: elements of a group of the norm; 0 without a norm."""
    size = norm_size or _GATED_BLOCK
    return GateLaunch(size, max(1, min(16, size // 512)))


class Mamba2Weights(NamedTuple):
    """float32: rates (-exp(a_log)), biases (dt_bias) and skips (D) [heads], scales (the norm's weight) [inner] or None.

    `norm_size`: elements of a group of the norm; 0 without a norm.
    """

    rates: Tensor
    biases: Tensor
    skips: Tensor
    scales: Tensor | None
    groups: int
    conv_size: int
    dt_limits: tuple[float, float]
    norm_size: int
    norm_before_gate: bool
    eps: float

    def constants(self, matrix: Tensor) -> dict[str, Any]:
        """The constants that both forms have. matrix: the states [slots, heads, head_dim, state_size]."""
        heads, head_dim, state_size = matrix.shape[1:]
        return dict(HEADS=heads, HEAD_DIM=head_dim, GROUPS=self.groups, STATE=state_size)

    def window_constants(self) -> dict[str, int]:
        return dict(SIZE=self.conv_size, ROWS=triton.next_power_of_2(max(1, self.conv_size - 1)))


def step_sequences(
    weights: Mamba2Weights, y: Tensor, projected: Tensor, window: Tensor, matrix: Tensor, rows: StateRows, out: Tensor,
    *, min_chunked: int,
) -> None:  # fmt: skip
    """Write outputs before the gate, states and windows of all sequences with fewer than `min_chunked` tokens, of all
    if it is 0.

    y: output of the convolution [T, channels], contiguous. projected: the rows that mamba2.py describes. out: [T,
    inner], contiguous.
    """
    heads, head_dim, state_size = matrix.shape[1:]
    sequences, launch = rows.slots.shape[0], pick_recurrence(head_dim, state_size)
    _step_heads[(min(sequences, _SEQUENCES), heads, triton.cdiv(head_dim, launch.block))](
        y, projected, weights.rates, weights.biases, weights.skips, window, matrix, rows.slots, rows.seq_lens,
        rows.cu_seqlens, out, sequences, projected.stride(0), *weights.dt_limits, **weights.constants(matrix),
        **weights.window_constants(), BLOCK=launch.block, MIN_CHUNKED=min_chunked, num_warps=launch.num_warps,
    )  # fmt: skip


def gate_and_norm(weights: Mamba2Weights, projected: Tensor, out: Tensor) -> None:
    """Apply the gate z and the norm to `out`, in place."""
    tokens, inner = out.shape
    launch = pick_gate(weights.norm_size)
    _gate_and_norm[(tokens, triton.cdiv(inner, launch.size))](
        projected, weights.scales, out, projected.stride(0), weights.eps, INNER=inner, NORM_SIZE=launch.size,
        BLOCK=launch.block, NORM_BEFORE_GATE=weights.norm_before_gate, num_warps=launch.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens", "sequences"])
def _step_heads(
    y, projected, rates, biases, skips, window, matrix, slots, seq_lens, cu_seqlens, out, sequences, stride, dt_min,
    dt_max, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MIN_CHUNKED: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    inner: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE
    group_size: tl.constexpr = HEADS // GROUPS
    element = out.dtype.element_ty
    at, n_at = part * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_row = at < HEAD_DIM
    x_at = head * HEAD_DIM + tl.minimum(at, HEAD_DIM - 1)  # rows past the head repeat its last channel
    b_at = inner + head // group_size * STATE + n_at
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    end = tl.load(cu_seqlens + sequences)
    first = tl.load(cu_seqlens + sequence)
    while first < end:
        count = tl.load(cu_seqlens + sequence + 1) - first
        length = tl.load(seq_lens + sequence)
        row = first.to(tl.int64)
        if length == 0:
            for _ in range(count):
                tl.store(out + row * inner + x_at, tl.zeros((BLOCK,), element), is_row)
                row += 1
        elif (count > 0) & ((MIN_CHUNKED == 0) | (count < MIN_CHUNKED)):
            slot = tl.load(slots + sequence)
            states = matrix + (slot * HEADS * HEAD_DIM + x_at)[:, None] * STATE + n_at[None, :]
            state = tl.load(states, is_row[:, None] & (length != count), other=0.0)
            for _ in range(count):
                dt = _step_size(projected + row * stride + inner + channels + head, bias, dt_min, dt_max, True)
                x = tl.load(y + row * channels + x_at).to(tl.float32)
                b = tl.load(y + row * channels + b_at).to(tl.float32)
                state = state * tl.exp(dt * rate) + (dt * x)[:, None] * b[None, :]
                c = tl.load(y + row * channels + GROUPS * STATE + b_at).to(tl.float32)
                o = tl.sum(state * c[None, :], 1) + skip * x
                tl.store(out + row * inner + x_at, o.to(element), is_row)
                row += 1
            tl.store(states, state, is_row[:, None])
            is_new = length == count
            inputs = projected + inner
            _update_window(inputs, window, slot, first, count, is_new, stride, channels, x_at, SIZE, ROWS)
            if (head % group_size == 0) & (part == 0):
                _update_window(inputs, window, slot, first, count, is_new, stride, channels, b_at, SIZE, ROWS)
                c_at = GROUPS * STATE + b_at
                _update_window(inputs, window, slot, first, count, is_new, stride, channels, c_at, SIZE, ROWS)
        sequence += tl.num_programs(0)
        first = tl.load(cu_seqlens + tl.minimum(sequence, sequences))


@triton.jit
def _gate_and_norm(
    projected, scales, out, stride, eps, INNER: tl.constexpr, NORM_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
):  # fmt: skip
    """In place: `out` holds y. Where y is 0 the result is 0, whatever z is: padding has zeros. scales: None without a
    norm."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    place = tl.program_id(1) * NORM_SIZE + at
    mask = (at < NORM_SIZE) & (place < INNER)
    element = out.dtype.element_ty
    y = tl.load(out + token * INNER + place, mask, other=0.0).to(tl.float32)
    z = tl.load(projected + token * stride + place, mask, other=0.0).to(tl.float32)
    gate = tl.where(y == 0, 0.0, z / (1 + tl.exp(-z)))
    if scales is None:
        y *= gate
    else:
        if not NORM_BEFORE_GATE:
            y *= gate
        y = (y / tl.sqrt(tl.sum(y * y, 0) / NORM_SIZE + eps)).to(element).to(tl.float32)
        y *= tl.load(scales + place, mask, other=0.0)
        if NORM_BEFORE_GATE:
            y *= gate
    tl.store(out + token * INNER + place, y.to(element), mask)


@triton.jit
def _step_size(dt, bias, dt_min, dt_max, mask):
    """d of the tokens: clamp(softplus(dt + bias), dt_min, dt_max). `dt`: pointers. Masked tokens are computed with
    dt = 0."""
    step = _softplus(tl.load(dt, mask, other=0.0).to(tl.float32) + bias)
    return tl.clamp(step, dt_min, dt_max, propagate_nan=tl.PropagateNan.ALL)
