"""Mamba-2 and LFM2's short convolution; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.gpu_properties import SM_90
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED
from coatcheck.kernels.linear_attention.convolution import convolve
from coatcheck.kernels.linear_attention.mamba2_chunks import pick_scan, scan_sequences
from coatcheck.kernels.linear_attention.mamba2_recurrence import gate_and_norm, step_sequences
from coatcheck.kernels.linear_attention.short_conv import ShortConv
from tests.kernels.linear_attention.delta_nets import rows_of
from tests.kernels.linear_attention.state_spaces import Layer, make_conv, make_inputs, make_mamba, make_state
from tests.kernels.triton.agreement import SENTINEL

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# (slot, tokens before, tokens): new sequences, ones that go on, padding (-1) and empty ones; of lengths around those of
# chunks. Each slot of the second step was in the first one.
_STEPS = (
    [(3, 0, 65), (1, 0, 1), (0, -1, 3), (5, 2, 0), (4, 0, 33), (0, -1, 1), (0, -1, 0)],
    [(1, 1, 64), (0, 0, 31), (4, 33, 2), (3, 65, 1), (0, -1, 5), (0, -1, 0), (0, -1, 0)],
)
_NO_LIMITS = (0.0, float("inf"))


def mamba2(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Outputs, states and windows are those of the formula in torch, for the heads, groups and norms of all types."""
    for dtype in dtypes:
        layers = [
            make_mamba(dtype, 3, 16, 1, 16, None),
            make_mamba(dtype, 6, 24, 2, 32, (2, True), has_bias=False),
            make_mamba(dtype, 2, 80, 1, 64, (1, False), dt_limits=_NO_LIMITS),
            make_mamba(dtype, 2, 32, 2, 32, None, dt_limits=(1.0, 1.0), has_bias=False, taps=1, has_gate=False),
        ]
        for layer, wide_tiles in zip(layers, (True, False, True, True), strict=True):
            _compare(layer, dtype, wide_tiles)
    for index, (head_dim, size) in enumerate(((64, 128), (128, 256))):
        dtype = dtypes[index % len(dtypes)]
        _compare(make_mamba(dtype, 1, head_dim, 1, size, (1, False)), dtype, True)
    many_sequences(dtypes[0])
    same_bits(make_mamba(dtypes[0], 2, 16, 1, 16, (1, False), batch_invariant=True), dtypes[0])
    decodes(make_mamba(dtypes[-1], 2, 24, 2, 16, (2, False)), dtypes[-1])
    prefill_equals_decodes(dtypes[0])
    broken_step_size(dtypes[0])


def short_convolutions(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Outputs and windows are those of the formula in torch: of 1 to 5 taps, and of channels that fill no tile."""
    for dtype in dtypes:
        for channels, taps in ((144, 3), (32, 5), (20, 1), (130, 2)):
            layer = ShortConv(make_conv(channels, taps, dtype, has_bias=taps != 3))
            _compare(layer, dtype, True)
    same_bits(ShortConv(make_conv(48, 3, dtypes[0]), batch_invariant=True), dtypes[0])
    decodes(ShortConv(make_conv(48, 4, dtypes[-1])), dtypes[-1])


def _compare(layer: Layer, dtype: torch.dtype, wide_tiles: bool) -> None:
    ours, theirs = make_state(layer, 6, dtype), make_state(layer, 6, dtype)
    for seed, step in enumerate(_STEPS):
        rows = rows_of(*step)
        inputs = make_inputs(layer, int(rows.cu_seqlens[-1]), dtype, seed)
        for row, length in enumerate(rows.seq_lens.tolist()):
            if not length:
                inputs[int(rows.cu_seqlens[row]) : int(rows.cu_seqlens[row + 1])] = float("nan")
        _agree(_launch(layer, inputs, ours, rows, wide_tiles), layer.reference(inputs, theirs, rows))
        _agree_states(ours, theirs, dtype)


def _launch(layer: Layer, inputs: Tensor, state: RecurrentState, rows: StateRows, wide_tiles: bool) -> Tensor:
    """In the interpreter as on a GPU with these products, also for float32, which has no chunks there."""
    if inputs.is_cuda or isinstance(layer, ShortConv):
        return layer(inputs, state, rows)
    assert state.matrix is not None
    gpu = SM_90._replace(convert=1, wide_tiles=wide_tiles)
    out = torch.full((len(inputs), layer.inner), SENTINEL, dtype=inputs.dtype)
    y = convolve(
        inputs[:, layer.inner :], layer.conv.taps, layer.conv.biases, state.window, rows, batch_invariant=False
    )
    arguments = (layer.weights, y, inputs, state.window, state.matrix, rows, out)
    step_sequences(*arguments, min_chunked=MIN_CHUNKED)
    scan_sequences(*arguments, pick_scan(layer.head_dim, layer.state_size, gpu))
    if layer.has_gate:
        gate_and_norm(layer.weights, inputs, out)
    return out


def many_sequences(dtype: torch.dtype) -> None:
    """More sequences than programs, of which most are empty, as in a step that is replayed from a CUDA graph."""
    layer = make_mamba(dtype, 1, 16, 1, 16, None)
    counts = [1] * 100 + [0, 3] + [1] * 60 + [0] * 40
    ours, theirs = make_state(layer, len(counts), dtype), make_state(layer, len(counts), dtype)
    rows = rows_of(*((slot, slot % 3, count) for slot, count in enumerate(counts)))
    inputs = make_inputs(layer, sum(counts), dtype)
    _agree(layer(inputs, ours, rows), layer.reference(inputs, theirs, rows))
    _agree_states(ours, theirs, dtype)


def same_bits(layer: Layer, dtype: torch.dtype) -> None:
    """In batch-invariant mode a sequence has the same bits whole, and in chunks beside a neighbour and padding."""
    inputs = make_inputs(layer, 40, dtype)
    whole_state = make_state(layer, 3, dtype)
    whole = layer(inputs, whole_state, rows_of((2, 0, 40)))
    state, outs = make_state(layer, 3, dtype), []
    for start, count in ((0, 1), (1, 33), (34, 6)):
        part = inputs[start : start + count]
        rows = rows_of((0, 0, count), (1, start, count), (0, -1, 1))
        outs.append(layer(torch.cat((part, part, part[:1])), state, rows)[count : 2 * count])
    assert torch.equal(torch.cat(outs), whole)
    _agree(whole, layer.reference(inputs, make_state(layer, 1, dtype), rows_of((0, 0, 40))))
    for tensor, of_whole in zip(state.tensors, whole_state.tensors, strict=True):
        assert torch.equal(tensor[1], of_whole[2])


def decodes(layer: Layer, dtype: torch.dtype) -> None:
    """A step of one token for each sequence, whose convolution has other tiles; slots that it does not name stay."""
    ours, theirs = make_state(layer, 5, dtype), make_state(layer, 5, dtype)
    rows = rows_of((1, 7, 1), (0, -1, 1), (4, 0, 1), (2, 99, 1))
    rows = StateRows(rows.slots, rows.seq_lens, rows.cu_seqlens, max_query_len=1)
    inputs = make_inputs(layer, 4, dtype)
    _agree(layer(inputs, ours, rows), layer.reference(inputs, theirs, rows))
    _agree_states(ours, theirs, dtype)
    for tensor, old in zip(ours.tensors, make_state(layer, 5, dtype).tensors, strict=True):
        assert torch.equal(tensor[[0, 3]], old[[0, 3]])


def prefill_equals_decodes(dtype: torch.dtype) -> None:
    """A prompt in chunks, and the same tokens one by one from the state of its first half."""
    layer = make_mamba(dtype, 2, 16, 1, 32, (1, False), dt_limits=_NO_LIMITS)
    inputs = make_inputs(layer, 70, dtype)
    whole_state, state = make_state(layer, 1, dtype), make_state(layer, 1, dtype)
    whole = _launch(layer, inputs, whole_state, rows_of((0, 0, 70)), True)
    outs = [_launch(layer, inputs[:35], state, rows_of((0, 0, 35)), True)]
    outs += [layer(inputs[at : at + 1], state, rows_of((0, at, 1))) for at in range(35, 70)]
    _agree(torch.cat(outs), whole)
    _agree_states(state, whole_state, dtype)


def broken_step_size(dtype: torch.dtype) -> None:
    """A step size of NaN makes the head's outputs NaN from its token on, in decodes and in chunks."""
    layer = make_mamba(dtype, 2, 16, 1, 16, None)
    for count in (3, MIN_CHUNKED + 3):
        inputs = make_inputs(layer, count, dtype)
        inputs[1, -2] = float("nan")  # the first of two heads
        out = _launch(layer, inputs, make_state(layer, 1, dtype), rows_of((0, 0, count)), True)
        is_nan = out.view(count, 2, 16).isnan()
        assert is_nan[1:, 0].all() and not is_nan[:, 1].any()


def _agree_states(ours: RecurrentState, theirs: RecurrentState, dtype: torch.dtype) -> None:
    if ours.matrix is not None and theirs.matrix is not None:
        _agree(ours.matrix, theirs.matrix, _TOLERANCES[dtype])
    assert torch.equal(ours.window, theirs.window)


def _agree(have: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Up to a share of the largest element."""
    tolerance = _TOLERANCES[have.dtype] if tolerance is None else tolerance
    assert (have - want).abs().max() <= tolerance * want.abs().max(), ((have - want).abs().max(), want.abs().max())
