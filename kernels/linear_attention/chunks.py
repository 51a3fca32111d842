"""The chunked form of the gated delta rule on a GPU: matrix products over 32 or 64 tokens (Yang et al., 2412.06464).

g_t is the sum of the log decays from the chunk's first token to t, and S the state before the chunk:

    A[t, i] = beta_t exp(g_t - g_i) (k_t . k_i) for i < t, else 0;   T = (I + A)^-1
    U = T (beta (v - exp(g) k S))
    o = exp(g) q S + P U,   P[t, i] = exp(g_t - g_i) (q_t . k_i) for i <= t, else 0
    S = exp(g_last) S + (exp(g_last - g) k)^T U

There are three kernels. `_prepare_chunks` computes T, P and g of all chunks in parallel. `_scan_chunks` computes the
chunks of a sequence in order: a program keeps some columns of one head's state in registers, and at the end replaces
the convolution's window of its channels. `_norm_and_gate` needs whole rows of o, so it runs last. T, P and o are
rounded to the model's dtype; sums and states are float32.

A series in powers of A would lose its digits to cancellation: with equal keys the powers grow as binomial coefficients.
So T is computed in two steps, from blocks of 8 tokens: D is A within the blocks, N the rest, and I + A = (I + D)
(I + M) with M = (I + D)^-1 N. D and M are nilpotent of index 8 or less, so (I + X)^-1 = (I - X) (I + X^2) (I + X^4),
whose coefficients stay below 36.

A chunk begins at a sequence's first token of the step, so a token's bits depend on how the prompt was cut into steps.
In deterministic mode recurrence.py computes all tokens. Otherwise it computes the sequences that have fewer than
MIN_CHUNKED tokens in the step.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.linear_attention.convolution import _update_window
from coatcheck.kernels.linear_attention.recurrence import DeltaNetWeights, _beta, _log_decay, _normalised
from coatcheck.kernels.linear_attention.step_tiles import _locate_tile, count_tiles

# The input_precision of most products. It is no default argument: Triton 3.6 does not compile a default that is a str.
_EXACT = tl.constexpr("ieee")
MIN_CHUNKED = 32  # a sequence with this many tokens in a step is computed in chunks; at most the size of a chunk


class ChunkLaunch(NamedTuple):
    """`chunk`: tokens of a chunk. `columns`: columns of a head's state that one program of `_scan_chunks` keeps.
    `inverse`: Triton's input_precision for the products that compute T."""

    chunk: int
    columns: int
    prepare_warps: int
    scan_warps: int
    inverse: str


def takes_chunks(dtype: torch.dtype, *, batch_invariant: bool) -> bool:
    """Whether long sequences are computed in chunks. In float32 they are not: its products spill registers at every
    tile size, or round to 10 bits (TF32)."""
    return dtype != torch.float32 and not batch_invariant


def pick_chunks(value_dim: int, gpu: GpuProperties) -> ChunkLaunch:
    """64 tokens on GPUs whose products read operands from shared memory (`wide_tiles`), otherwise 32, because larger
    chunks would spill registers. T is computed by bf16x3, which Triton's interpreter lacks."""
    inverse = "ieee" if gpu.convert == 1 else "bf16x3"
    return ChunkLaunch(64 if gpu.wide_tiles else 32, min(32, value_dim), 4, 8, inverse)


def compute_chunks(
    weights: DeltaNetWeights, y: Tensor, qkvz: Tensor, ba: Tensor, window: Tensor, matrix: Tensor, rows: StateRows,
    out: Tensor, launch: ChunkLaunch,
) -> None:  # fmt: skip
    """As recurrence.compute_tokens, but for the sequences with MIN_CHUNKED tokens or more."""
    heads, key_dim, value_dim = matrix.shape[1:]
    tokens, sequences, device = qkvz.shape[0], rows.slots.shape[0], qkvz.device
    t, p = (torch.empty((tokens, heads, launch.chunk), dtype=qkvz.dtype, device=device) for _ in range(2))
    g = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    sizes = dict(
        HEADS=heads, KEY_HEADS=weights.key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, CHUNK=launch.chunk,
        MIN_CHUNKED=MIN_CHUNKED,
    )  # fmt: skip
    tiles = count_tiles(tokens, sequences, launch.chunk, MIN_CHUNKED)
    _prepare_chunks[(tiles, heads)](
        y, ba, weights.rates, weights.biases, rows.seq_lens, rows.cu_seqlens, t, p, g, sequences, ba.stride(0), **sizes,
        INVERSE=launch.inverse, num_warps=launch.prepare_warps,
    )  # fmt: skip
    _scan_chunks[(tiles, heads, value_dim // launch.columns)](
        y, qkvz, ba, t, p, g, window, matrix, rows.slots, rows.seq_lens, rows.cu_seqlens, out, sequences,
        qkvz.stride(0), ba.stride(0), **sizes, COLUMNS=launch.columns, SIZE=weights.conv_size,
        ROWS=triton.next_power_of_2(max(1, weights.conv_size - 1)), num_warps=launch.scan_warps, num_stages=1,
    )  # fmt: skip
    _norm_and_gate[(tiles, heads)](
        qkvz, weights.scales, rows.seq_lens, rows.cu_seqlens, out, sequences, qkvz.stride(0), y.shape[1], weights.eps,
        HEADS=heads, VALUE_DIM=value_dim, CHUNK=launch.chunk, MIN_CHUNKED=MIN_CHUNKED, num_warps=4,
    )  # fmt: skip


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION: Triton's input_precision, if a and b are float32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse_of_nilpotent(x, PRECISION: tl.constexpr):
    """(I + x)^-1 for an x with x^8 = 0."""
    at = tl.arange(0, x.shape[0])
    one = (at[:, None] == at[None, :]).to(tl.float32)
    square = _product(x, x, PRECISION)
    inverse = one - x
    inverse += _product(inverse, square, PRECISION)
    return inverse + _product(inverse, _product(square, square, PRECISION), PRECISION)


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "sequences"])
def _prepare_chunks(
    y, ba, rates, biases, seq_lens, cu_seqlens, t, p, g, sequences, ba_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, MIN_CHUNKED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, first, count, start = _locate_tile(cu_seqlens, tile, sequences, CHUNK, MIN_CHUNKED)
    if (tl.load(seq_lens + sequence) > 0) & (count >= MIN_CHUNKED) & (start < count):
        group: tl.constexpr = HEADS // KEY_HEADS
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
        at, k_at = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
        is_token = start + at < count
        row = (first + start + at).to(tl.int64)
        mask = is_token[:, None]
        inputs = y + row[:, None] * channels + head // group * KEY_DIM + k_at[None, :]
        k = _normalised(tl.load(inputs + KEY_HEADS * KEY_DIM, mask, other=0.0)).to(y.dtype.element_ty)
        rate, bias = tl.load(rates + head), tl.load(biases + head)
        log = _log_decay(ba + row * ba_stride + HEADS + head, rate, bias, is_token)
        beta = _beta(ba + row * ba_stride + head, is_token)
        total = tl.cumsum(tl.where(is_token, log, 0.0), 0)
        places = row * HEADS + head
        tl.store(g + places, total, is_token)
        is_past = at[:, None] >= at[None, :]
        decays = tl.where(is_past, tl.exp(tl.where(is_past, total[:, None] - total[None, :], 0.0)), 0.0)
        q = _normalised(tl.load(inputs, mask, other=0.0)) * (KEY_DIM**-0.5)
        scores = _product(q.to(k.dtype), tl.trans(k), _EXACT) * decays
        tl.store(p + places[:, None] * CHUNK + at[None, :], scores.to(p.dtype.element_ty), mask)
        a = tl.where(at[:, None] > at[None, :], _product(k, tl.trans(k), _EXACT) * decays, 0.0) * beta[:, None]
        in_block = (at // 8)[:, None] == (at // 8)[None, :]
        blocks = _inverse_of_nilpotent(tl.where(in_block, a, 0.0), INVERSE)
        rest = _product(blocks, tl.where(in_block, 0.0, a), INVERSE)
        inverse = _product(_inverse_of_nilpotent(rest, INVERSE), blocks, INVERSE)
        tl.store(t + places[:, None] * CHUNK + at[None, :], inverse.to(t.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens", "sequences"])
def _scan_chunks(
    y, qkvz, ba, t, p, g, window, matrix, slots, seq_lens, cu_seqlens, out, sequences, qkvz_stride, ba_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, MIN_CHUNKED: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, count, tile_start = _locate_tile(cu_seqlens, tile, sequences, CHUNK, MIN_CHUNKED)
    length = tl.load(seq_lens + sequence)
    if (length > 0) & (count >= MIN_CHUNKED) & (tile_start == 0):
        group: tl.constexpr = HEADS // KEY_HEADS
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
        element = out.dtype.element_ty
        at, k_at = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        slot = tl.load(slots + sequence)
        states = matrix + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + k_at[:, None] * VALUE_DIM + column[None, :]
        state = tl.load(states, length != count, other=0.0)
        for start in range(0, count, CHUNK):
            is_token = start + at < count
            mask = is_token[:, None]
            row = (first + start + at).to(tl.int64)
            places = row * HEADS + head
            total = tl.load(g + places, is_token, other=0.0)
            last = tl.min(total, 0)  # the sum up to the last token: log decays are negative, so their sums only fall
            inputs = y + row[:, None] * channels + head // group * KEY_DIM + k_at[None, :]
            k = _normalised(tl.load(inputs + KEY_HEADS * KEY_DIM, mask, other=0.0))
            values = y + row[:, None] * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column[None, :]
            v = tl.load(values, mask, other=0.0).to(tl.float32)
            rounded = state.to(element)
            v -= tl.exp(total)[:, None] * _product(k.to(element), rounded, _EXACT)
            v *= _beta(ba + row * ba_stride + head, is_token)[:, None]
            inverse = tl.load(t + places[:, None] * CHUNK + at[None, :], mask, other=0.0)
            update = _product(inverse, v.to(element), _EXACT).to(element)
            q = _normalised(tl.load(inputs, mask, other=0.0)) * (tl.exp(total) * KEY_DIM**-0.5)[:, None]
            scores = tl.load(p + places[:, None] * CHUNK + at[None, :], mask, other=0.0)
            o = _product(q.to(element), rounded, _EXACT) + _product(scores, update, _EXACT)
            tl.store(out + places[:, None] * VALUE_DIM + column[None, :], o.to(element), mask)
            k *= tl.exp(last - total)[:, None]
            state = state * tl.exp(last) + _product(tl.trans(k.to(element)), update, _EXACT)
        tl.store(states, state)
        is_new = length == count
        channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, channel, SIZE, ROWS)
        if (head % group == 0) & (part == 0):
            q_channel = head // group * KEY_DIM + k_at
            _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, q_channel, SIZE, ROWS)
            k_channel = KEY_HEADS * KEY_DIM + q_channel
            _update_window(qkvz, window, slot, first, count, is_new, qkvz_stride, channels, k_channel, SIZE, ROWS)


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "sequences"])
def _norm_and_gate(
    qkvz, scales, seq_lens, cu_seqlens, out, sequences, qkvz_stride, channels, eps,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, MIN_CHUNKED: tl.constexpr,
):  # fmt: skip
    """out = norm_weight * norm(o) * silu(z), in place: `out` holds o."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, first, count, start = _locate_tile(cu_seqlens, tile, sequences, CHUNK, MIN_CHUNKED)
    if (tl.load(seq_lens + sequence) > 0) & (count >= MIN_CHUNKED) & (start < count):
        element = out.dtype.element_ty
        at, v_at = tl.arange(0, CHUNK), tl.arange(0, VALUE_DIM)
        mask = (start + at < count)[:, None]
        row = (first + start + at).to(tl.int64)
        places = out + (row * HEADS + head)[:, None] * VALUE_DIM + v_at[None, :]
        o = tl.load(places, mask, other=0.0).to(tl.float32)
        squares = tl.sum(o * o, 1)[:, None]
        o = (o / tl.sqrt(squares / VALUE_DIM + eps)).to(element).to(tl.float32)
        gates = qkvz + row[:, None] * qkvz_stride + channels + head * VALUE_DIM + v_at[None, :]
        z = tl.load(gates, mask, other=0.0).to(tl.float32)
        o = (tl.load(scales + v_at)[None, :] * o).to(element).to(tl.float32) * (z / (1 + tl.exp(-z)))
        tl.store(places, o.to(element), mask)
