"""The gated delta net's C form beside the formula in torch, and what neither may depend on: chunks and neighbours."""

import pytest
import torch

from coatcheck.kernels import native
from coatcheck.kernels.kv.recurrent_state import StateRows
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.linear_attention.state_sizes import fits_gpu
from coatcheck.kernels.linear_attention.step_tiles import _first_tile, count_tiles
from tests.kernels.linear_attention.delta_nets import make_inputs, make_net, make_state, rows_of

needs_native = pytest.mark.skipif(native.library() is None, reason="the C library is not built")

SIZES = [(1, 1, 16, 16), (2, 4, 32, 16), (2, 2, 64, 128), (1, 3, 16, 48)]
KINDS = ("qwen", "olmo", "kimi")


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_c_form_computes_the_formula(
    kind: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """New sequences and ones that go on, chunks of 1 to 37 tokens and padding: outputs and states are the formula's."""
    net = make_net(dtype, *sizes, kind=kind)
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
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_chunks_or_neighbours(kind: str, dtype: torch.dtype) -> None:
    """A sequence whole, in chunks of every length, and beside another sequence has the same outputs and state."""
    net = make_net(dtype, 2, 4, 32, 48, kind=kind)
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


@needs_native
def test_slow_and_fast_decays_of_channels() -> None:
    """Decays from 0 to the float32 nearest 1 are the formula's: the softplus of a small input keeps its digits."""
    net = make_net(torch.float32, 1, 1, 16, 16, kind="kimi")
    qkvz, ba = make_inputs(net, 300, torch.float32)
    ba[:, 1:] = torch.linspace(-30, 60, 16)
    rows = rows_of((0, 0, 300))
    ours, theirs = make_state(net, 1, torch.float32), make_state(net, 1, torch.float32)
    out, wanted = net(qkvz, ba, ours, rows), net.reference(qkvz, ba, theirs, rows)
    assert (out - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert (ours.tensors[1] - theirs.tensors[1]).abs().max() <= 2e-5 * theirs.tensors[1].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_the_c_form_lacks_take_the_formula(kind: str) -> None:
    """Heads of 24 are no multiple of 16: torch computes them."""
    net = make_net(torch.float32, 1, 2, 24, 24, kind=kind)
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


@needs_native
def test_an_infinite_a_forgets_the_state() -> None:
    """Its decay is 0, and no output is NaN."""
    net, rows = make_net(torch.float32, 2, 4, 32, 16, kind="kimi"), rows_of((0, 0, 5))
    qkvz, ba = make_inputs(net, 5, torch.float32)
    ba[2, net.value_heads :] = torch.inf
    out, wanted = (form(qkvz, ba, make_state(net, 1, torch.float32), rows) for form in (net, net.reference))
    assert not wanted.isnan().any()
    assert (out - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(("size", "min_tokens"), [(1, 0), (16, 0), (64, 32), (32, 32)])
def test_each_tile_of_a_step_on_a_gpu_has_one_sequence(size: int, min_tokens: int) -> None:
    """Whatever the lengths, sequences have their tiles one after the other, without overlap, and all tiles are
    launched."""
    random = torch.Generator().manual_seed(1)
    for _ in range(200):
        lens = torch.randint(0, 150, (8,), generator=random) * torch.randint(0, 2, (8,), generator=random)
        starts = [0, *lens.cumsum(0).tolist()]
        end = 0
        for sequence, count in enumerate(lens.tolist()):
            first = _first_tile.fn(starts[sequence], sequence, size, min_tokens)
            if count >= max(1, min_tokens):
                assert first >= end
                end = first + -(-count // size)
        assert end <= count_tiles(starts[-1], len(lens), size, min_tokens)


def test_heads_of_a_gpu() -> None:
    """Powers of two from 16 on whose state fits into the registers of a program."""
    assert [fits_gpu(*dims) for dims in ((128, 128), (64, 256), (16, 16), (256, 128), (96, 128), (128, 8))] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
