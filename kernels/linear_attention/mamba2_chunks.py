"""The chunked form of Mamba-2 on a GPU: state space duality by matrix products (Dao and Gu, 2024, 2405.21060).

d_t is the step size of token t, g_t the sum of d * rate from the chunk's first token to t, and S the state before the
chunk, [head_dim, state_size]. With the rows x_t, B_t and C_t:

    y_t = exp(g_t) S C_t + sum_{i <= t} exp(g_t - g_i) d_i (C_t . B_i) x_i + skip * x_t
    S = exp(g_last) S + sum_i exp(g_last - g_i) d_i x_i B_i^T

The products C_t . B_i are equal for all heads of a group. So `_multiply_chunks` computes those of all chunks in
parallel, in float32. `_scan_heads` computes the chunks of a sequence in order: a program keeps some rows of one head's
state in registers, as [state_size, COLUMNS], and at the end replaces the convolution's window of its channels. Factors
of a product are rounded to the model's dtype; sums and states are float32.

A chunk begins at a sequence's first token of the step, so a token's bits depend on how the prompt was cut into steps.
In deterministic mode mamba2_recurrence.py computes all tokens. Otherwise it computes the sequences that have fewer than
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
from coatcheck.kernels.linear_attention.chunks import _EXACT, MIN_CHUNKED, _product
from coatcheck.kernels.linear_attention.convolution import _update_window
from coatcheck.kernels.linear_attention.mamba2_recurrence import Mamba2Weights, _step_size
from coatcheck.kernels.linear_attention.step_tiles import _locate_tile, count_tiles


class ScanLaunch(NamedTuple):
    """`chunk`: tokens of a chunk. `columns`: rows of a head's state that one program of `_scan_heads` keeps."""

    chunk: int
    columns: int
    multiply_warps: int
    scan_warps: int


def pick_scan(head_dim: int, state_size: int, gpu: GpuProperties) -> ScanLaunch:
    """64 tokens and columns on GPUs whose products read operands from shared memory (`wide_tiles`), otherwise 32,
    because larger tiles would spill registers. 32 also for states above 128."""
    is_large = state_size > 128
    size = 64 if gpu.wide_tiles and not is_large else 32
    columns = size if head_dim % 64 == 0 else 32
    columns = max(16, min(columns, triton.next_power_of_2(head_dim)))
    return ScanLaunch(size, columns, 4, 4 if is_large else 8)


def scan_sequences(
    weights: Mamba2Weights, y: Tensor, projected: Tensor, window: Tensor, matrix: Tensor, rows: StateRows, out: Tensor,
    launch: ScanLaunch,
) -> None:  # fmt: skip
    """As mamba2_recurrence.step_sequences, but for the sequences with MIN_CHUNKED tokens or more."""
    heads, head_dim = matrix.shape[1:3]
    tokens, sequences = projected.shape[0], rows.slots.shape[0]
    products = torch.empty((tokens, weights.groups, launch.chunk), dtype=torch.float32, device=projected.device)
    constants = dict(**weights.constants(matrix), CHUNK=launch.chunk, MIN_CHUNKED=MIN_CHUNKED)
    tiles = count_tiles(tokens, sequences, launch.chunk, MIN_CHUNKED)
    _multiply_chunks[(tiles, weights.groups)](
        y, rows.seq_lens, rows.cu_seqlens, products, sequences, **constants, num_warps=launch.multiply_warps
    )
    _scan_heads[(tiles, heads, triton.cdiv(head_dim, launch.columns))](
        y, projected, products, weights.rates, weights.biases, weights.skips, window, matrix, rows.slots, rows.seq_lens,
        rows.cu_seqlens, out, sequences, projected.stride(0), *weights.dt_limits, **constants, COLUMNS=launch.columns,
        **weights.window_constants(), num_warps=launch.scan_warps, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seq_lens", "cu_seqlens", "sequences"])
def _multiply_chunks(
    y, seq_lens, cu_seqlens, products, sequences,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CHUNK: tl.constexpr, MIN_CHUNKED: tl.constexpr,
):  # fmt: skip
    """products[t, group, i] = C_t . B_i for all t and i of a chunk."""
    tile, group = tl.program_id(0), tl.program_id(1)
    sequence, first, count, start = _locate_tile(cu_seqlens, tile, sequences, CHUNK, MIN_CHUNKED)
    if (tl.load(seq_lens + sequence) > 0) & (count >= MIN_CHUNKED) & (start < count):
        inner: tl.constexpr = HEADS * HEAD_DIM
        at = tl.arange(0, CHUNK)
        mask = (start + at < count)[:, None]
        row = (first + start + at).to(tl.int64)[:, None]
        b_at = y + row * (inner + 2 * GROUPS * STATE) + inner + group * STATE + tl.arange(0, STATE)[None, :]
        b, c = tl.load(b_at, mask, other=0.0), tl.load(b_at + GROUPS * STATE, mask, other=0.0)
        tl.store(products + (row * GROUPS + group) * CHUNK + at[None, :], _product(c, tl.trans(b), _EXACT), mask)


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens", "sequences"])
def _scan_heads(
    y, projected, products, rates, biases, skips, window, matrix, slots, seq_lens, cu_seqlens, out, sequences, stride,
    dt_min, dt_max, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CHUNK: tl.constexpr, MIN_CHUNKED: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, count, tile_start = _locate_tile(cu_seqlens, tile, sequences, CHUNK, MIN_CHUNKED)
    length = tl.load(seq_lens + sequence)
    if (length > 0) & (count >= MIN_CHUNKED) & (tile_start == 0):
        inner: tl.constexpr = HEADS * HEAD_DIM
        channels: tl.constexpr = inner + 2 * GROUPS * STATE
        group_size: tl.constexpr = HEADS // GROUPS
        element = out.dtype.element_ty
        at, n_at = tl.arange(0, CHUNK), tl.arange(0, STATE)
        p_at = part * COLUMNS + tl.arange(0, COLUMNS)
        is_column = p_at < HEAD_DIM
        x_at = head * HEAD_DIM + tl.minimum(p_at, HEAD_DIM - 1)  # columns past the head repeat its last channel
        group = head // group_size
        b_at = inner + group * STATE + n_at
        rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
        is_past = at[:, None] >= at[None, :]
        slot = tl.load(slots + sequence)
        states = matrix + (slot * inner + x_at)[None, :] * STATE + n_at[:, None]
        state = tl.load(states, is_column[None, :] & (length != count), other=0.0)
        for start in range(0, count, CHUNK):
            is_token = start + at < count
            mask = is_token[:, None]
            begin = (first + start).to(tl.int64)
            row = begin + at
            dt = _step_size(projected + row * stride + inner + channels + head, bias, dt_min, dt_max, is_token)
            dt = tl.where(is_token, dt, 0.0)
            total = tl.cumsum(dt * rate, 0)
            last = tl.min(total, 0)  # the sum up to the last token: no term is positive
            inputs = y + begin * channels + at[:, None] * channels  # at * channels is small
            decays = tl.exp(tl.where(is_past, total[:, None] - total[None, :], float("-inf")))
            scores = tl.load(
                products + (begin * GROUPS + group) * CHUNK + at[:, None] * (GROUPS * CHUNK) + at[None, :],
                mask,
                other=0.0,
            )
            scores *= decays * dt[None, :]
            x = tl.load(inputs + x_at[None, :], mask, other=0.0)
            o = _product(scores.to(element), x, _EXACT)
            c = tl.load(inputs + (GROUPS * STATE + b_at)[None, :], mask, other=0.0)
            o += _product(c, state.to(element), _EXACT) * tl.exp(total)[:, None]
            wide = x.to(tl.float32)
            o += skip * wide
            tl.store(
                out + begin * inner + at[:, None] * inner + x_at[None, :], o.to(element), mask & is_column[None, :]
            )
            wide *= (tl.exp(last - total) * dt)[:, None]
            b = tl.load(inputs + b_at[None, :], mask, other=0.0)
            state = state * tl.exp(last) + _product(tl.trans(b), wide.to(element), _EXACT)
        tl.store(states, state, is_column[None, :])
        is_new = length == count
        x_rows = projected + inner
        _update_window(x_rows, window, slot, first, count, is_new, stride, channels, x_at, SIZE, ROWS)
        if (head % group_size == 0) & (part == 0):
            _update_window(x_rows, window, slot, first, count, is_new, stride, channels, b_at, SIZE, ROWS)
            c_at = GROUPS * STATE + b_at
            _update_window(x_rows, window, slot, first, count, is_new, stride, channels, c_at, SIZE, ROWS)
