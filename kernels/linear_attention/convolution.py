"""The causal convolution of gated delta nets and Mamba-2 on a GPU, with its SiLU.

    y = silu(bias + sum_j conv[j] * x[t - conv_size + 1 + j])   each channel by itself, rounded to the dtype before silu

Shapes: x = columns [0, channels) of qkvz [T, *], whose rows may be strided; y [T, channels], contiguous. The sequence's
window holds the inputs before the step's first token. A program computes ROWS tokens of one sequence and BLOCK
channels. It reads the window and does not change it. The kernels of the recurrence, which run later, replace the window
(`_update_window`), each channel in one program. So no program reads a window that another one has replaced.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.linear_attention.step_tiles import _locate_tile, count_tiles


class ConvolutionLaunch(NamedTuple):
    """`rows`: tokens of a program. `block`: channels of a program."""

    rows: int
    block: int
    num_warps: int


def pick_convolution(max_query_len: int, *, batch_invariant: bool) -> ConvolutionLaunch:
    """`max_query_len`: as in StateRows. In batch-invariant mode all steps have the same launch."""
    return ConvolutionLaunch(1, 512, 4) if max_query_len == 1 and not batch_invariant else ConvolutionLaunch(16, 128, 4)


def convolve(
    qkvz: Tensor, taps: Tensor, biases: Tensor | None, window: Tensor, rows: StateRows, *, batch_invariant: bool
) -> Tensor:
    """y. taps: float32 [conv_size, channels]. biases: float32 [channels]. window: [slots, conv_size - 1, channels]. The
    rows of padding tokens stay unset."""
    size, channels = taps.shape
    tokens, sequences = qkvz.shape[0], rows.slots.shape[0]
    y = torch.empty((tokens, channels), dtype=qkvz.dtype, device=qkvz.device)
    launch = pick_convolution(rows.max_query_len, batch_invariant=batch_invariant)
    grid = (count_tiles(tokens, sequences, launch.rows), triton.cdiv(channels, launch.block))
    _convolve[grid](
        qkvz, taps, biases, window, rows.slots, rows.seq_lens, rows.cu_seqlens, y, sequences, qkvz.stride(0), channels,
        SIZE=size, ROWS=launch.rows, BLOCK=launch.block, num_warps=launch.num_warps,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["slots", "seq_lens", "cu_seqlens", "sequences"])
def _convolve(
    qkvz, taps, biases, window, slots, seq_lens, cu_seqlens, y, sequences, qkvz_stride, channels,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    sequence, first, count, start = _locate_tile(cu_seqlens, tile, sequences, ROWS, 0)
    length = tl.load(seq_lens + sequence)
    if (start < count) & (length > 0):
        at = start + tl.arange(0, ROWS)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_column = channel < channels
        inputs = qkvz + first.to(tl.int64) * qkvz_stride
        before = window + (tl.load(slots + sequence) + 1) * (SIZE - 1) * channels  # the end of the slot's rows
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        if biases is not None:
            sums += tl.load(biases + channel, is_column, other=0.0)[None, :]
        for tap in tl.static_range(SIZE):
            token = at + (tap - SIZE + 1)
            offset = token.to(tl.int64)[:, None]
            is_here = ((token >= 0) & (at < count))[:, None] & is_column[None, :]
            x = tl.load(inputs + offset * qkvz_stride + channel[None, :], is_here, other=0.0).to(tl.float32)
            if SIZE > 1:
                is_old = ((token < 0) & (at < count) & (length != count))[:, None] & is_column[None, :]
                x += tl.load(before + offset * channels + channel[None, :], is_old, other=0.0).to(tl.float32)
            sums += tl.load(taps + tap * channels + channel, is_column, other=0.0)[None, :] * x
        sums = sums.to(y.dtype.element_ty).to(tl.float32)
        sums = sums / (1 + tl.exp(-sums))
        places = (first + at).to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(y + places, sums.to(y.dtype.element_ty), (at < count)[:, None] & is_column[None, :])


@triton.jit
def _update_window(
    qkvz, window, slot, first, count, is_new, qkvz_stride, channels, channel,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Replace the window of a slot, for the block of channels `channel`, by the last SIZE - 1 inputs of a sequence. Its
    `count` tokens of this step are rows `first` and following of qkvz. ROWS: a power of two, at least SIZE - 1."""
    if SIZE > 1:
        row = tl.arange(0, ROWS)
        token = count - (SIZE - 1) + row
        is_row = row < SIZE - 1
        x = tl.load(
            qkvz + (first + token).to(tl.int64)[:, None] * qkvz_stride + channel[None, :],
            ((token >= 0) & is_row)[:, None], other=0.0,
        )  # fmt: skip
        start = window + slot * (SIZE - 1) * channels
        old = tl.load(
            start + (count + row)[:, None] * channels + channel[None, :],
            ((token < 0) & is_row & (is_new == 0))[:, None], other=0.0,
        )  # fmt: skip
        tl.debug_barrier()  # other threads of this program store the rows that this one loads
        kept = tl.where((token >= 0)[:, None], x, old)
        tl.store(start + row[:, None] * channels + channel[None, :], kept, is_row[:, None])
