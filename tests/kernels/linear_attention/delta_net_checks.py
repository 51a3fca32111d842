"""Gated delta nets; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.gpu_properties import SM_90
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED, compute_chunks, pick_chunks
from coatcheck.kernels.linear_attention.convolution import convolve
from coatcheck.kernels.linear_attention.gated_delta_net import GatedDeltaNet
from coatcheck.kernels.linear_attention.recurrence import compute_tokens
from tests.kernels.linear_attention.delta_nets import make_inputs, make_net, make_state, rows_of
from tests.kernels.triton.agreement import SENTINEL

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# (slot, tokens before, tokens): new sequences, ones that go on, padding (-1) and empty ones; of lengths around those of
# chunks. Each slot of the second step was in the first one.
_STEPS = (
    [(3, 0, 65), (1, 0, 1), (0, -1, 1), (4, 0, 33), (0, -1, 1), (0, -1, 0)],
    [(1, 1, 40), (0, 0, 31), (4, 33, 2), (3, 65, 1), (0, -1, 1), (0, -1, 0), (0, -1, 0)],
)


def delta_nets(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Outputs, states and windows are those of the formula in torch, in chunks of 64 and of 32 tokens."""
    for index, dtype in enumerate(dtypes):
        net = make_net(dtype, *((1, 2, 32, 16), (1, 1, 16, 32))[index % 2])
        for wide_tiles in (True, False) if dtype == torch.float32 else (True,):
            _compare(net, dtype, wide_tiles)
    for kind in ("olmo", "kimi"):
        _compare(make_net(dtypes[0], 1, 2, 32, 16, kind=kind), dtypes[0], True)
    equal_keys(dtypes[0])
    same_bits(dtypes[0])
    decodes(dtypes[-1])


def _compare(net: GatedDeltaNet, dtype: torch.dtype, wide_tiles: bool) -> None:
    ours, theirs = make_state(net, 5, dtype), make_state(net, 5, dtype)
    for seed, step in enumerate(_STEPS):
        rows = rows_of(*step)
        qkvz, ba = make_inputs(net, int(rows.cu_seqlens[-1]), dtype, seed)
        out, wanted = _launch(net, qkvz, ba, ours, rows, wide_tiles), net.reference(qkvz, ba, theirs, rows)
        _agree(out, wanted)
        assert torch.equal(ours.window, theirs.window)
        assert ours.matrix is not None and theirs.matrix is not None
        _agree(ours.matrix, theirs.matrix, _TOLERANCES[dtype])


def _launch(
    net: GatedDeltaNet, qkvz: Tensor, ba: Tensor, state: RecurrentState, rows: StateRows, wide_tiles: bool
) -> Tensor:
    """In the interpreter as on a GPU with these products, also for float32, which has no chunks there."""
    if qkvz.is_cuda or not net.is_plain:
        return net(qkvz, ba, state, rows)
    assert state.matrix is not None
    gpu = SM_90._replace(convert=1, wide_tiles=wide_tiles)
    out = torch.full((len(qkvz), net.value_heads * net.value_dim), SENTINEL, dtype=qkvz.dtype)
    y = convolve(qkvz, net._taps, None, state.window, rows, batch_invariant=False)
    inputs = (net.weights, y, qkvz, ba, state.window, state.matrix, rows, out)
    compute_tokens(*inputs, min_chunked=MIN_CHUNKED)
    compute_chunks(*inputs, pick_chunks(net.value_dim, gpu))
    return out


def equal_keys(dtype: torch.dtype) -> None:
    """Equal tokens with betas near 1 and decays near 1: the inverse of the chunk form does not cancel."""
    net = make_net(dtype, 1, 1, 16, 16)
    qkvz, ba = (x[:1].expand(70, -1).contiguous() for x in make_inputs(net, 1, dtype))
    ba[:, 0], ba[:, 1] = 9, -20
    rows = rows_of((0, 0, 70))
    ours, theirs = make_state(net, 1, dtype), make_state(net, 1, dtype)
    _agree(_launch(net, qkvz, ba, ours, rows, True), net.reference(qkvz, ba, theirs, rows))


def same_bits(dtype: torch.dtype) -> None:
    """In batch-invariant mode a sequence has the same bits whole, and in chunks beside a neighbour and padding."""
    net = make_net(dtype, 1, 2, 16, 16, batch_invariant=True)
    qkvz, ba = make_inputs(net, 40, dtype)
    whole_state = make_state(net, 3, dtype)
    whole = net(qkvz, ba, whole_state, rows_of((2, 0, 40)))
    state, outs = make_state(net, 3, dtype), []
    for start, count in ((0, 1), (1, 33), (34, 6)):
        part = slice(start, start + count)
        twice, also = (torch.cat((x[part], x[part], x[:1])) for x in (qkvz, ba))
        rows = rows_of((0, 0, count), (1, start, count), (0, -1, 1))
        outs.append(net(twice, also, state, rows)[count : 2 * count])
    assert torch.equal(torch.cat(outs), whole)
    _agree(whole, net.reference(qkvz, ba, make_state(net, 1, dtype), rows_of((0, 0, 40))))
    assert state.matrix is not None and whole_state.matrix is not None
    assert torch.equal(state.matrix[1], whole_state.matrix[2])
    assert torch.equal(state.window[1], whole_state.window[2])


def decodes(dtype: torch.dtype) -> None:
    """A step of one token for each sequence, whose convolution has other tiles; slots that it does not name stay."""
    net = make_net(dtype, 1, 2, 16, 16)
    ours, theirs = make_state(net, 5, dtype), make_state(net, 5, dtype)
    rows = rows_of((1, 7, 1), (0, -1, 1), (4, 0, 1), (2, 99, 1))
    rows = StateRows(rows.slots, rows.seq_lens, rows.cu_seqlens, max_query_len=1)
    qkvz, ba = make_inputs(net, 4, dtype)
    _agree(net(qkvz, ba, ours, rows), net.reference(qkvz, ba, theirs, rows))
    assert torch.equal(ours.window, theirs.window)
    assert ours.matrix is not None and torch.equal(ours.matrix[[0, 3]], torch.full((2, 2, 16, 16), 5.0))


def _agree(have: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Up to a share of the largest element."""
    tolerance = _TOLERANCES[have.dtype] if tolerance is None else tolerance
    assert (have - want).abs().max() <= tolerance * want.abs().max(), ((have - want).abs().max(), want.abs().max())
