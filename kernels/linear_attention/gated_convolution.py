"""LFM2's gated short convolution on a GPU. The formula is in short_conv.py.

A program of `_convolve_gated` computes ROWS tokens of one sequence and BLOCK channels. A sequence that has at most ROWS
tokens in the step has one program for each block of channels, which replaces the window after reading it. The first
program of a longer sequence reads the window, and the last one has its new rows. So for those sequences
`_store_windows` replaces the windows afterwards. Outputs of padding tokens are zeros.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.linear_attention.convolution import pick_convolution
from coatcheck.kernels.linear_attention.step_tiles import _locate_tile, count_tiles


def convolve_gated(
    bcx: Tensor, taps: Tensor, biases: Tensor | None, window: Tensor, rows: StateRows, *, batch_invariant: bool
) -> Tensor:
    """out [T, channels]. Replaces the windows in the slots of `rows`.

    bcx: [T, 3 * channels], rows may be strided. taps: float32 [conv_size, channels]. biases: float32 [channels].
    window: [slots, conv_size - 1, channels].
    """
    size, channels = taps.shape
    tokens, sequences = bcx.shape[0], rows.slots.shape[0]
    out = torch.empty((tokens, channels), dtype=bcx.dtype, device=bcx.device)
    if not tokens or not sequences:
        return out
    launch = pick_convolution(rows.max_query_len, batch_invariant=batch_invariant)
    blocks = triton.cdiv(channels, launch.block)
    constants = dict(
        SIZE=size, ROWS=launch.rows, BLOCK=launch.block, WINDOW_ROWS=triton.next_power_of_2(max(1, size - 1))
    )
    _convolve_gated[(count_tiles(tokens, sequences, launch.rows), blocks)](
        bcx, taps, biases, window, rows.slots, rows.seq_lens, rows.cu_seqlens, out, sequences, bcx.stride(0), channels,
        **constants, num_warps=launch.num_warps,
    )  # fmt: skip
    if size > 1 and rows.max_query_len > launch.rows:
        _store_windows[(sequences, blocks)](
            bcx, window, rows.slots, rows.seq_lens, rows.cu_seqlens, bcx.stride(0), channels, **constants,
            num_warps=launch.num_warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens", "sequences"])
def _convolve_gated(
    bcx, taps, biases, window, slots, seq_lens, cu_seqlens, out, sequences, stride, channels,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW_ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    sequence, first, count, start = _locate_tile(cu_seqlens, tile, sequences, ROWS, 0)
    length = tl.load(seq_lens + sequence)
    if start < count:
        element = out.dtype.element_ty
        at = start + tl.arange(0, ROWS)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_column = channel < channels
        is_here = (at < count)[:, None] & is_column[None, :]
        places = out + (first + at).to(tl.int64)[:, None] * channels + channel[None, :]
        if length == 0:
            tl.store(places, tl.zeros((ROWS, BLOCK), element), is_here)
        else:
            slot = tl.load(slots + sequence)
            inputs = bcx + first.to(tl.int64) * stride
            before = window + (slot + 1) * (SIZE - 1) * channels  # the end of the slot's rows
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            if biases is not None:
                sums += tl.load(biases + channel, is_column, other=0.0)[None, :]
            for tap in tl.static_range(SIZE):
                token = at + (tap - SIZE + 1)
                u = _gated_inputs(inputs, token, (token >= 0) & (at < count), channel, is_column, stride, channels)
                u = u.to(tl.float32)
                if SIZE > 1:
                    is_old = ((token < 0) & (at < count) & (length != count))[:, None] & is_column[None, :]
                    old = before + token.to(tl.int64)[:, None] * channels + channel[None, :]
                    u += tl.load(old, is_old, other=0.0).to(tl.float32)
                sums += tl.load(taps + tap * channels + channel, is_column, other=0.0)[None, :] * u
            c = tl.load(inputs + at.to(tl.int64)[:, None] * stride + channels + channel[None, :], is_here, other=0.0)
            result = c.to(tl.float32) * sums.to(element).to(tl.float32)
            tl.store(places, result.to(element), is_here)
            if count <= ROWS:
                _replace_window(
                    inputs, window, slot, count, length == count, stride, channels, channel, is_column, SIZE,
                    WINDOW_ROWS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens"])
def _store_windows(
    bcx, window, slots, seq_lens, cu_seqlens, stride, channels,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW_ROWS: tl.constexpr,
):  # fmt: skip
    """The windows of sequences with more than ROWS tokens."""
    sequence = tl.program_id(0)
    first = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - first
    length = tl.load(seq_lens + sequence)
    if (length > 0) & (count > ROWS):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inputs, slot = bcx + first.to(tl.int64) * stride, tl.load(slots + sequence)
        _replace_window(
            inputs, window, slot, count, length == count, stride, channels, channel, channel < channels, SIZE,
            WINDOW_ROWS,
        )  # fmt: skip


@triton.jit
def _gated_inputs(inputs, token, is_token, channel, is_column, stride, channels):
    """b * x of these tokens, rounded to the dtype; zeros where `is_token` or `is_column` is false. `inputs`: the row of
    the sequence's first token in the step."""
    at = inputs + token.to(tl.int64)[:, None] * stride + channel[None, :]
    mask = is_token[:, None] & is_column[None, :]
    b, x = tl.load(at, mask, other=0.0), tl.load(at + 2 * channels, mask, other=0.0)
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@triton.jit
def _replace_window(
    inputs, window, slot, count, is_new, stride, channels, channel, is_column,
    SIZE: tl.constexpr, WINDOW_ROWS: tl.constexpr,
):  # fmt: skip
    """Replace the window of a slot by the last SIZE - 1 values of u of a sequence, which has `count` tokens in the
    step. WINDOW_ROWS: a power of two, at least SIZE - 1."""
    if SIZE > 1:
        row = tl.arange(0, WINDOW_ROWS)
        token = count - (SIZE - 1) + row
        is_row = row < SIZE - 1
        u = _gated_inputs(inputs, token, is_row & (token >= 0), channel, is_column, stride, channels)
        start = window + slot * (SIZE - 1) * channels + channel[None, :]
        is_old = is_row & (token < 0) & (is_new == 0)
        old = tl.load(start + (count + row)[:, None] * channels, is_old[:, None] & is_column[None, :], other=0.0)
        tl.debug_barrier()  # other threads of this program store the rows that this one loads
        kept = tl.where((token >= 0)[:, None], u, old)
        tl.store(start + row[:, None] * channels, kept, is_row[:, None] & is_column[None, :])
