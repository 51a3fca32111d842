"""The C forms of short convolutions and of Mamba-2 beside their formulas, and what neither may depend on."""

import pytest
import torch
import torch.nn.functional as F

from coatcheck.kernels import native
from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.linear_attention.lightning_attention import LightningAttention
from coatcheck.kernels.linear_attention.short_conv import ShortConv
from tests.kernels.linear_attention.delta_nets import rows_of
from tests.kernels.linear_attention.state_spaces import LAYERS, draw, make_conv, make_inputs, make_mamba, make_state

needs_native = pytest.mark.skipif(native.library() is None, reason="the C library is not built")


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
            wrong = (our_tensor - tensor).abs() > tolerance * tensor.abs().amax() if tensor.numel() else tensor
            assert not wrong.any()


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


@pytest.mark.parametrize("head_dim", [16, 8])
def test_lightning_attention_is_a_sum_with_decays(head_dim: int) -> None:
    """out_t = sum over s <= t of exp(-slope * (t - s)) * (q_t . k_s) * v_s, for heads that C computes and for others,
    in two steps."""
    heads, tokens, slopes = 3, 20, torch.tensor([0.9, 0.1, 1e-5])
    layer = LightningAttention(slopes, head_dim, torch.float32)
    state = RecurrentState(torch.zeros(1, 0, 3 * heads * head_dim), torch.full((1, heads, head_dim, head_dim), 5.0))
    qkv = draw(tokens, heads * 3 * head_dim)
    q, k, v = F.silu(qkv).view(tokens, heads, 3, head_dim).permute(2, 1, 0, 3)
    distances = torch.arange(tokens)[:, None] - torch.arange(tokens)
    decays = torch.where(distances >= 0, (-slopes[:, None, None] * distances).exp(), 0.0)
    wanted = (q @ k.mT * decays @ v).transpose(0, 1).flatten(1)
    out = torch.cat([layer(qkv[:13], state, rows_of((0, 0, 13))), layer(qkv[13:], state, rows_of((0, 13, 7)))])
    assert (out - wanted).abs().max() <= 2e-5 * wanted.abs().max()


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
