"""The C form of Mamba's convolution and selective scan beside their formulas, and what neither may depend on."""

import math

import pytest
import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.linear_attention.selective_scan import SelectiveScan
from tests.kernels.linear_attention.delta_nets import rows_of
from tests.kernels.linear_attention.state_spaces import draw, make_conv

needs_native = pytest.mark.skipif(native.library() is None, reason="the C library is not built")
DTYPES = [torch.float32, torch.bfloat16]


def make_scan(channels: int, size: int, dtype: torch.dtype, *, taps: int = 4) -> SelectiveScan:
    """dt of very different sizes: from states that forget at once to ones that keep everything."""
    return SelectiveScan(
        conv=make_conv(channels, taps, dtype),
        a_log=draw(channels, size),
        dt_bias=torch.linspace(-30, 25, channels).to(dtype),
        skip=draw(channels, seed=3).to(dtype),
    )


def make_state(scan: SelectiveScan, slots: int, dtype: torch.dtype) -> RecurrentState:
    """Slots full of what an earlier sequence may have left."""
    return RecurrentState(
        torch.full((slots, *scan.conv.window), 3.0, dtype=dtype), torch.full((slots, *scan.matrix), 5.0)
    )


def make_inputs(scan: SelectiveScan, tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """The rows of x and gate, of dt, and of B and C, all strided but dt."""
    channels = scan.conv.channels
    wide, dt = (draw(tokens, width, seed=seed + width).to(dtype) for width in (2 * channels, channels))
    return wide, dt, draw(tokens, 2 * scan.state_size + 3, seed=seed).to(dtype)[:, 1 : 2 * scan.state_size + 1]


def compute(scan: SelectiveScan, inputs: tuple[Tensor, ...], state: RecurrentState, rows: StateRows) -> Tensor:
    """What the mixer computes of one step."""
    (x, gate), dt, bc = inputs[0].chunk(2, dim=1), inputs[1], inputs[2]
    return scan.scan(scan.convolve(x, state, rows), dt, bc, gate, state, rows)


def compute_reference(
    scan: SelectiveScan, inputs: tuple[Tensor, ...], state: RecurrentState, rows: StateRows
) -> Tensor:
    (x, gate), dt, bc = inputs[0].chunk(2, dim=1), inputs[1], inputs[2]
    return scan.scan_reference(scan.convolve_reference(x, state, rows), dt, bc, gate, state, rows)


def test_the_reference_computes_the_published_formula() -> None:
    """One sequence, with the exponentials of the paper, a channel at a time."""
    scan = make_scan(24, 5, torch.float32)
    inputs, state = make_inputs(scan, 7, torch.float32), make_state(scan, 1, torch.float32)
    out = compute_reference(scan, inputs, state, rows_of((0, 0, 7)))
    (x, gate), dt, (b, c) = inputs[0].chunk(2, dim=1), inputs[1], inputs[2].chunk(2, dim=1)
    for channel in (0, 9, 23):
        hidden, window = torch.zeros(5), [0.0] * 3
        for t in range(7):
            window.append(float(x[t, channel]))
            taps = scan.conv.weight[channel]
            total = float(scan.conv.bias[channel]) + sum(float(taps[j]) * window[t + j] for j in range(4))  # type: ignore[index]
            u = total / (1 + math.exp(-total))
            d = math.log1p(math.exp(float(dt[t, channel]) + float(scan.dt_bias[channel])))
            hidden = hidden * (-scan.a_log[channel].exp() * d).exp() + d * u * b[t]
            z = float(gate[t, channel])
            wanted = (float(hidden @ c[t]) + float(scan.skip[channel]) * u) * z / (1 + math.exp(-z))
            assert float(out[t, channel]) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("channels", "size", "taps"), [(80, 16, 4), (16, 1, 2), (144, 33, 8)])
def test_the_c_form_computes_the_formula(
    channels: int, size: int, taps: int, dtype: torch.dtype, tolerance: float
) -> None:
    """New sequences and ones that go on, chunks of 1 to 70 tokens and padding: outputs and states are the formula's."""
    scan = make_scan(channels, size, dtype, taps=taps)
    ours, theirs = make_state(scan, 5, dtype), make_state(scan, 5, dtype)
    steps = [rows_of((3, 0, 70), (1, 0, 1)), rows_of((1, 1, 2), (0, 0, 5), (4, -1, 2), (3, 70, 1))]
    for seed, rows in enumerate(steps):
        inputs = make_inputs(scan, int(rows.cu_seqlens[-1]), dtype, seed)
        out, wanted = compute(scan, inputs, ours, rows), compute_reference(scan, inputs, theirs, rows)
        assert (out - wanted).abs().max() <= tolerance * wanted.abs().max()
        for our_tensor, tensor in zip(ours.tensors, theirs.tensors, strict=True):
            assert (our_tensor - tensor).abs().max() <= tolerance * tensor.abs().max()


@needs_native
def test_small_steps_are_exact() -> None:
    """softplus of -30 is e^-30, not 0: a channel that remembers long still takes its input."""
    scan = make_scan(16, 2, torch.float32)
    x, gate, bc = torch.full((1, 16), 2.0), torch.full((1, 16), 3.0), torch.ones(1, 4)
    dt, state = torch.linspace(-50, 60, 16)[None] - scan.dt_bias, make_state(scan, 1, torch.float32)
    scan.scan(x, dt, bc, gate, state, rows_of((0, 0, 1)))
    assert state.matrix is not None
    wanted = torch.nn.functional.softplus(dt[0].double() + scan.dt_bias.double()) * 2
    assert torch.allclose(state.matrix[0, 0, 0].double(), wanted, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_chunks_or_neighbours(dtype: torch.dtype) -> None:
    """A sequence whole, in chunks of every length, and beside another sequence has the same outputs and state."""
    scan = make_scan(80, 16, dtype)
    inputs, whole_state = make_inputs(scan, 40, dtype), make_state(scan, 3, dtype)
    whole = compute(scan, inputs, whole_state, rows_of((2, 0, 40)))
    for chunk in (1, 2, 3, 17, 39):
        state, outs = make_state(scan, 3, dtype), []
        for start in range(0, 40, chunk):
            count = min(chunk, 40 - start)
            # A neighbour with the same tokens from its own beginning comes first in the step.
            twice = tuple(torch.cat((part[start : start + count],) * 2) for part in inputs)
            outs.append(compute(scan, twice, state, rows_of((0, 0, count), (1, start, count)))[count:])
        assert torch.equal(torch.cat(outs), whole)
        for tensor, of_whole in zip(state.tensors, whole_state.tensors, strict=True):
            assert torch.equal(tensor[1], of_whole[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [80, 24])
def test_outputs_of_padding_are_zeros(channels: int, dtype: torch.dtype) -> None:
    """Whatever its rows hold, beside empty sequences too; the states of its slots stay. 24 channels: torch's form."""
    scan = make_scan(channels, 16, dtype)
    rows = rows_of((0, 0, 3), (1, -1, 2), (2, 4, 0), (3, -1, 0), (4, 0, 1), (5, -1, 3))
    inputs, is_padding = make_inputs(scan, 9, dtype), torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    for part in inputs:
        part[is_padding] = torch.nan
    state, old = make_state(scan, 6, dtype), make_state(scan, 6, dtype)
    out = compute(scan, inputs, state, rows)
    assert not out[is_padding].any() and out[~is_padding].any(1).all() and not out.isnan().any()
    for tensor, old_tensor in zip(state.tensors, old.tensors, strict=True):
        assert torch.equal(tensor[[1, 2, 3, 5]], old_tensor[[1, 2, 3, 5]])


def test_sizes_that_the_c_form_lacks_take_the_formula() -> None:
    """24 channels are no multiple of 16, and a state may have at most 256 elements: torch computes them."""
    rows = rows_of((0, 0, 4), (1, 0, 1))
    for channels, size in ((24, 16), (16, 257)):
        scan = make_scan(channels, size, torch.float32)
        inputs = make_inputs(scan, 5, torch.float32)
        out = compute(scan, inputs, make_state(scan, 2, torch.float32), rows)
        assert torch.equal(out, compute_reference(scan, inputs, make_state(scan, 2, torch.float32), rows))


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Rows of another width or dtype, and weights that do not fit the channels: the error names the tensor."""
    scan, rows = make_scan(16, 4, torch.float32), rows_of((0, 0, 2))
    wide, dt, bc = make_inputs(scan, 2, torch.float32)
    state, x, gate = make_state(scan, 1, torch.float32), wide[:, :16].contiguous(), wide[:, 16:]
    for name, arguments in (
        ("x", (x[:, 1:], dt, bc, gate)),
        ("dt", (x, dt.bfloat16(), bc, gate)),
        ("bc", (x, dt, bc[:, 1:], gate)),
        ("gate", (x, dt, bc, gate[:1])),
        ("x: expected contiguous rows", (wide[:, :16], dt, bc, gate)),
    ):
        with pytest.raises(LaunchRefused, match=name):
            scan.scan(*arguments, state, rows)
    with pytest.raises(LaunchRefused, match="matrix"):
        scan.convolve(x, RecurrentState(state.window, None), rows)
    with pytest.raises(LaunchRefused, match="dt_bias"):
        SelectiveScan(scan.conv, scan.a_log, scan.dt_bias[1:], scan.skip)
