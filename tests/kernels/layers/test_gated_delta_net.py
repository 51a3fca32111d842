"""The gated delta net's C form beside the formula in torch, and what neither may depend on: chunks and neighbours."""

import pytest
import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.gated_delta_net import GatedDeltaNet
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import LaunchRefused

needs_native = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


def make_net(dtype: torch.dtype, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> GatedDeltaNet:
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return GatedDeltaNet(
        conv=draw(channels, 4).to(dtype),
        a_log=draw(value_heads),
        dt_bias=draw(value_heads).to(dtype),
        norm=(1 + 0.1 * draw(value_dim)).to(dtype),
        eps=1e-6,
        key_heads=key_heads,
        key_dim=key_dim,
    )


def make_state(net: GatedDeltaNet, slots: int, dtype: torch.dtype) -> RecurrentState:
    """Slots full of what an earlier sequence may have left."""
    return RecurrentState(
        torch.full((slots, net.conv.shape[1] - 1, net.channels), 3.0, dtype=dtype),
        torch.full((slots, net.value_heads, net.key_dim, net.value_dim), 5.0),
    )


def make_inputs(net: GatedDeltaNet, tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    width = net.channels + net.value_heads * net.value_dim
    qkvz = torch.randn(tokens, width + 3, generator=random).to(dtype)[:, :width]  # rows are strided
    return qkvz, torch.randn(tokens, 2 * net.value_heads, generator=random).to(dtype)


def rows_of(*sequences: tuple[int, int, int]) -> StateRows:
    """`sequences`: (slot, tokens before, tokens of the step)."""
    slots, before, counts = zip(*sequences, strict=True)
    ends = torch.tensor([0, *counts]).cumsum(0)
    lens = [b + c if b >= 0 else 0 for b, c in zip(before, counts, strict=True)]
    return StateRows(torch.tensor(slots), torch.tensor(lens, dtype=torch.int32), ends.to(torch.int32))


SIZES = [(1, 1, 16, 16), (2, 4, 32, 16), (2, 2, 64, 128), (1, 3, 16, 48)]


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_c_form_computes_the_formula(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """New sequences and ones that go on, chunks of 1 to 37 tokens and padding: outputs and states are the formula's."""
    net = make_net(dtype, *sizes)
    ours, theirs = make_state(net, 5, dtype), make_state(net, 5, dtype)
    steps = [rows_of((3, 0, 37), (1, 0, 1)), rows_of((1, 1, 2), (0, 0, 5), (4, -1, 2), (3, 37, 1))]
    for seed, rows in enumerate(steps):
        qkvz, ba = make_inputs(net, int(rows.cu_seqlens[-1]), dtype, seed)
        out, wanted = net(qkvz, ba, ours, rows), net.reference(qkvz, ba, theirs, rows)
        assert (out - wanted).abs().max() <= tolerance * wanted.abs().max()
        assert torch.equal(ours.window, theirs.window)
        our_matrix, matrix = ours.tensors[1], theirs.tensors[1]
        assert (our_matrix - matrix).abs().max() <= tolerance * matrix.abs().max()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_chunks_or_neighbours(dtype: torch.dtype) -> None:
    """A sequence whole, in chunks of every length, and beside another sequence has the same outputs and state."""
    net = make_net(dtype, 2, 4, 32, 48)
    qkvz, ba = make_inputs(net, 40, dtype)
    whole_state = make_state(net, 3, dtype)
    whole = net(qkvz, ba, whole_state, rows_of((2, 0, 40)))
    for chunk in (1, 2, 3, 17, 39):
        state, outs = make_state(net, 3, dtype), []
        for start in range(0, 40, chunk):
            count = min(chunk, 40 - start)
            part = slice(start, start + count)
            # A neighbour with the same tokens from its own beginning comes first in the step.
            rows = rows_of((0, 0, count), (1, start, count))
            outs.append(net(torch.cat((qkvz[part], qkvz[part])), torch.cat((ba[part], ba[part])), state, rows)[count:])
        assert torch.equal(torch.cat(outs), whole)
        for part_of, whole_of in zip(state.tensors, whole_state.tensors, strict=True):
            assert torch.equal(part_of[1], whole_of[2])


def test_heads_that_the_c_form_lacks_take_the_formula() -> None:
    """Heads of 24 are no multiple of 16: torch computes them."""
    net = make_net(torch.float32, 1, 2, 24, 24)
    qkvz, ba = make_inputs(net, 5, torch.float32)
    state, other = make_state(net, 1, torch.float32), make_state(net, 1, torch.float32)
    assert torch.equal(net(qkvz, ba, state, rows_of((0, 0, 5))), net.reference(qkvz, ba, other, rows_of((0, 0, 5))))


def test_wrong_arguments_are_refused() -> None:
    """A tensor of another shape or dtype is named in the refusal."""
    net = make_net(torch.float32, 1, 2, 16, 16)
    qkvz, ba = make_inputs(net, 5, torch.float32)
    state, rows = make_state(net, 1, torch.float32), rows_of((0, 0, 5))
    with pytest.raises(LaunchRefused, match="qkvz: expected shape"):
        net(qkvz[:, 1:], ba, state, rows)
    with pytest.raises(LaunchRefused, match="ba: expected dtype"):
        net(qkvz, ba.bfloat16(), state, rows)
    with pytest.raises(LaunchRefused, match="window: expected dtype"):
        net(qkvz, ba, make_state(net, 1, torch.bfloat16), rows)
    with pytest.raises(LaunchRefused, match="slots: expected dtype"):
        net(qkvz, ba, state, StateRows(rows.slots.int(), rows.seq_lens, rows.cu_seqlens))
