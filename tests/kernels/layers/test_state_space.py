"""The C forms of short convolutions and of Mamba-2 beside their formulas, and what neither may depend on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.linear_attention.mamba2 import GatedNorm, Mamba2
from coatcheck.kernels.linear_attention.short_conv import Convolution, ShortConv

needs_native = pytest.mark.skipif(native.library() is None, reason="the C library is not built")
Layer = ShortConv | Mamba2
Make = Callable[[torch.dtype], Layer]


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_conv(channels: int, taps: int, dtype: torch.dtype, *, has_bias: bool = True) -> Convolution:
    return Convolution(draw(channels, taps).to(dtype), draw(channels).to(dtype) if has_bias else None)


def make_mamba(
    dtype: torch.dtype, heads: int, head_dim: int, groups: int, size: int, norm: tuple[int, bool] | None
) -> Mamba2:
    inner = heads * head_dim
    return Mamba2(
        conv=make_conv(inner + 2 * groups * size, 4, dtype),
        a_log=draw(heads),
        dt_bias=draw(heads, seed=2).to(dtype),
        skip=draw(heads, seed=3).to(dtype),
        norm=norm and GatedNorm((1 + 0.1 * draw(inner)).to(dtype), 1e-5, *norm),
        dt_limits=(0.1, 0.9),
        groups=groups,
        head_dim=head_dim,
        state_size=size,
    )


LAYERS: dict[str, Make] = {
    "short convolution": lambda dtype: ShortConv(make_conv(144, 3, dtype, has_bias=False)),
    "short convolution with bias": lambda dtype: ShortConv(make_conv(32, 5, dtype)),
    "gate, then one norm": lambda dtype: make_mamba(dtype, 4, 24, 1, 32, (1, False)),
    "norm of groups, then gate": lambda dtype: make_mamba(dtype, 4, 16, 2, 16, (2, True)),
    "no norm": lambda dtype: make_mamba(dtype, 3, 16, 1, 48, None),
}


def width_of(layer: Layer) -> int:
    """Columns of a row."""
    conv = layer.conv
    return 3 * conv.channels if isinstance(layer, ShortConv) else layer.inner + conv.channels + layer.heads


def make_state(layer: Layer, slots: int, dtype: torch.dtype) -> RecurrentState:
    """Slots full of what an earlier sequence may have left."""
    matrix = (layer.heads, layer.head_dim, layer.state_size) if isinstance(layer, Mamba2) else None
    return RecurrentState(
        torch.full((slots, *layer.conv.window), 3.0, dtype=dtype),
        None if matrix is None else torch.full((slots, *matrix), 5.0),
    )


def make_inputs(layer: Layer, tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return draw(tokens, width_of(layer) + 3, seed=seed).to(dtype)[:, : width_of(layer)]  # rows are strided


def rows_of(*sequences: tuple[int, int, int]) -> StateRows:
    """`sequences`: (slot, tokens before, tokens of the step); -1 before: padding."""
    slots, before, counts = zip(*sequences, strict=True)
    ends = torch.tensor([0, *counts]).cumsum(0)
    lens = [b + c if b >= 0 else 0 for b, c in zip(before, counts, strict=True)]
    return StateRows(torch.tensor(slots), torch.tensor(lens, dtype=torch.int32), ends.to(torch.int32))


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", LAYERS)
def test_the_c_form_computes_the_formula(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """New sequences and ones that go on, chunks of 1 to 70 tokens and padding: outputs and states are the formula's."""
    layer = LAYERS[name](dtype)
    ours, theirs = make_state(layer, 5, dtype), make_state(layer, 5, dtype)
    steps = [rows_of((3, 0, 70), (1, 0, 1)), rows_of((1, 1, 2), (0, 0, 5), (4, -1, 2), (3, 70, 1))]
    for seed, rows in enumerate(steps):
        inputs = make_inputs(layer, int(rows.cu_seqlens[-1]), dtype, seed)
        out, wanted = layer(inputs, ours, rows), layer.reference(inputs, theirs, rows)
        assert (out - wanted).abs().max() <= tolerance * wanted.abs().max()
        for our_tensor, tensor in zip(ours.tensors, theirs.tensors, strict=True):
            assert (our_tensor - tensor).abs().max() <= tolerance * tensor.abs().max()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["short convolution", "gate, then one norm"])
def test_no_bit_depends_on_chunks_or_neighbours(name: str, dtype: torch.dtype) -> None:
    """A sequence whole, in chunks of every length, and beside another sequence has the same outputs and state."""
    layer = LAYERS[name](dtype)
    inputs, whole_state = make_inputs(layer, 40, dtype), make_state(layer, 3, dtype)
    whole = layer(inputs, whole_state, rows_of((2, 0, 40)))
    for chunk in (1, 2, 3, 17, 39):
        state, outs = make_state(layer, 3, dtype), []
        for start in range(0, 40, chunk):
            count = min(chunk, 40 - start)
            part = inputs[start : start + count]
            # A neighbour with the same tokens from its own beginning comes first in the step.
            outs.append(layer(torch.cat((part, part)), state, rows_of((0, 0, count), (1, start, count)))[count:])
        assert torch.equal(torch.cat(outs), whole)
        for tensor, of_whole in zip(state.tensors, whole_state.tensors, strict=True):
            assert torch.equal(tensor[1], of_whole[2])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_of_padding_are_zeros(name: str, dtype: torch.dtype) -> None:
    """Whatever its rows hold, beside empty sequences too; the states of its slots stay."""
    layer = LAYERS[name](dtype)
    rows = rows_of((0, 0, 3), (1, -1, 2), (2, 4, 0), (3, -1, 0), (4, 0, 1), (5, -1, 3))
    inputs, is_padding = make_inputs(layer, 9, dtype), torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    inputs[is_padding] = torch.nan
    state, old = make_state(layer, 6, dtype), make_state(layer, 6, dtype)
    out = layer(inputs, state, rows)
    assert not out[is_padding].any() and out[~is_padding].any(1).all() and not out.isnan().any()
    for tensor, old_tensor in zip(state.tensors, old.tensors, strict=True):
        assert torch.equal(tensor[[1, 2, 3, 5]], old_tensor[[1, 2, 3, 5]])


def test_sizes_that_the_c_form_lacks_take_the_formula() -> None:
    """24 channels or a state of 24 are no multiple of 16: torch computes them."""
    rows = rows_of((0, 0, 4), (1, 0, 1))
    for layer in (ShortConv(make_conv(24, 3, torch.float32)), make_mamba(torch.float32, 2, 8, 1, 24, (1, False))):
        inputs = make_inputs(layer, 5, torch.float32)
        out = layer(inputs, make_state(layer, 2, torch.float32), rows)
        assert torch.equal(out, layer.reference(inputs, make_state(layer, 2, torch.float32), rows))


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Rows of another width, and a state with or without a matrix: the launcher names the tensor."""
    conv, mamba = LAYERS["short convolution"](torch.float32), LAYERS["no norm"](torch.float32)
    rows = rows_of((0, 0, 2))
    for layer, other in ((conv, mamba), (mamba, conv)):
        inputs, state = make_inputs(layer, 2, torch.float32), make_state(layer, 1, torch.float32)
        with pytest.raises(LaunchRefused, match="bcx|projected"):
            layer(inputs[:, 1:], state, rows)
        with pytest.raises(LaunchRefused, match="window"):
            layer(inputs, make_state(other, 1, torch.float32), rows)
    with pytest.raises(LaunchRefused, match="matrix"):
        state = make_state(mamba, 1, torch.float32)
        mamba(make_inputs(mamba, 2, torch.float32), RecurrentState(state.window, None), rows)
    with pytest.raises(LaunchRefused, match="1 to 8 taps"):
        make_conv(16, 9, torch.float32)
