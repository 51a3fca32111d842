"""Layers with a state for bench/gpu.py: error, and bytes over the memory bandwidth.

Gated delta nets have the sizes of Qwen3-Next, Mamba-2 mixers those of Nemotron 3 Nano, short convolutions those of LFM2
2.6B. The bytes are those of the inputs, the outputs, and the states, which are read and written.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement, or_failure
from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.linear_attention.gated_delta_net import GatedDeltaNet
from coatcheck.kernels.linear_attention.mamba2 import GatedNorm, Mamba2
from coatcheck.kernels.linear_attention.short_conv import Convolution, ShortConv

_BF16 = torch.bfloat16
_BEFORE = 100  # tokens of a decoding sequence before the step
_LONGEST_CHECKED, _MOST_CHECKED = 130, 3  # tokens and sequences: the reference computes one token at a time
_TOLERANCE = 0.03


class _Layer(NamedTuple):
    """`compute` and `reference` compute a step from (*inputs, state, rows). `widths`: columns of each of the inputs.
    `window`, `matrix`: the shapes of a slot's state. `out`: columns of the output."""

    compute: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    widths: tuple[int, ...]
    window: tuple[int, int]
    matrix: tuple[int, int, int] | None
    out: int


_Make = Callable[[torch.device, bool, bool], _Layer]


def delta(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Gated delta nets: decodes and prompts, and prompts in a fixed order, token by token. The error is that of few
    short sequences."""
    yield from _measure_all("delta", _make_delta_net, device, roofs, quick=quick)


def mamba(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """As delta(), of Mamba-2 and of short convolutions."""
    yield from _measure_all("mamba", _make_mamba2, device, roofs, quick=quick)
    yield from _measure_all("mamba", _make_short_conv, device, roofs, quick=quick, title="short convolution, ")


def _make_delta_net(device: torch.device, quick: bool, batch_invariant: bool) -> _Layer:
    key_heads, heads, dim, taps = (2, 4, 32, 4) if quick else (16, 32, 128, 4)
    channels = (2 * key_heads + heads) * dim
    net = GatedDeltaNet(
        conv=(_draw(device, channels, taps) / 2).to(_BF16), a_log=_draw(device, heads),
        dt_bias=_draw(device, heads).to(_BF16), norm=(1 + 0.1 * _draw(device, dim)).to(_BF16), eps=1e-6,
        key_heads=key_heads, key_dim=dim, batch_invariant=batch_invariant,
    )  # fmt: skip
    widths = (channels + heads * dim, 2 * heads)
    return _Layer(net, net.reference, widths, (taps - 1, channels), (heads, dim, dim), heads * dim)


def _make_mamba2(device: torch.device, quick: bool, batch_invariant: bool) -> _Layer:
    heads, dim, groups, size, taps = (4, 16, 2, 32, 4) if quick else (64, 64, 8, 128, 4)
    inner = heads * dim
    conv = _make_conv(device, inner + 2 * groups * size, taps)
    mixer = Mamba2(
        conv=conv, a_log=_draw(device, heads), dt_bias=_draw(device, heads).to(_BF16),
        skip=_draw(device, heads).to(_BF16),
        norm=GatedNorm((1 + 0.1 * _draw(device, inner)).to(_BF16), 1e-5, groups, norm_before_gate=False),
        dt_limits=(0.0, float("inf")), groups=groups, head_dim=dim, state_size=size, batch_invariant=batch_invariant,
    )  # fmt: skip
    return _Layer(mixer, mixer.reference, (inner + conv.channels + heads,), conv.window, (heads, dim, size), inner)


def _make_short_conv(device: torch.device, quick: bool, batch_invariant: bool) -> _Layer:
    conv = _make_conv(device, 64 if quick else 2048, 3)
    layer = ShortConv(conv, batch_invariant=batch_invariant)
    return _Layer(layer, layer.reference, (3 * conv.channels,), conv.window, None, conv.channels)


def _make_conv(device: torch.device, channels: int, taps: int) -> Convolution:
    return Convolution((_draw(device, channels, taps) / 2).to(_BF16), _draw(device, channels).to(_BF16))


def _draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device)


def _measure_all(
    part: str, make: _Make, device: torch.device, roofs: Roofs, *, quick: bool, title: str = ""
) -> Iterator[Measurement]:
    one, many, decoding = (100, 40, 5) if quick else (8192, 2048, 64)
    cases = [
        (f"decode of {decoding}", [1] * decoding, False), ("decode of 1", [1], False),
        (f"prefill, 1 of {one}", [one], False), (f"prefill, 4 of {many}", [many] * 4, False),
        (f"prefill, 1 of {one}, batch-invariant", [one], True),
    ]  # fmt: skip
    for what, counts, batch_invariant in cases:
        torch.manual_seed(len(counts))
        layer = make(device, quick, batch_invariant)
        yield from or_failure(part, title + what, _measure(part, title + what, layer, counts, device, roofs))


def _measure(
    part: str, what: str, layer: _Layer, counts: Sequence[int], device: torch.device, roofs: Roofs
) -> Iterator[Measurement]:
    few = [min(count, _LONGEST_CHECKED) for count in counts[:_MOST_CHECKED]]
    error = _Step(layer, few, device).error()
    step = _Step(layer, counts, device)
    took = seconds(step.run, device, times=3)
    yield Measurement(
        part, f"{what}, {step.moved / 1e6:.0f} MB", took * 1e3, roofs.floor(step.moved) / took, error,
        target=f"error <= {_TOLERANCE:g}", met=error <= _TOLERANCE,
    )  # fmt: skip


class _Step:
    """A step of sequences with `counts` tokens each. Those with one token decode; the others are new."""

    def __init__(self, layer: _Layer, counts: Sequence[int], device: torch.device) -> None:
        tokens, slots = sum(counts), len(counts)
        self._layer = layer
        self._inputs = [_draw(device, tokens, width).to(_BF16) for width in layer.widths]
        matrix = None if layer.matrix is None else _draw(device, slots, *layer.matrix) / layer.matrix[-1]
        self._state = RecurrentState(_draw(device, slots, *layer.window).to(_BF16), matrix)
        lens = [count if count > 1 else _BEFORE for count in counts]
        self._rows = StateRows(
            torch.randperm(slots).to(device), torch.tensor(lens, dtype=torch.int32, device=device),
            torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32), max(counts),
        )  # fmt: skip
        states = sum(tensor.nbytes for tensor in self._state.tensors)
        read = sum(count == 1 for count in counts) / len(counts)  # new sequences start from zeros
        self.moved = sum(x.nbytes for x in self._inputs) + 2 * tokens * layer.out + (1 + read) * states

    def run(self) -> Tensor:
        return self._layer.compute(*self._inputs, self._state, self._rows)

    def error(self) -> float:
        """The largest difference from the reference, of the outputs and of the states, over the largest value."""
        before = [tensor.clone() for tensor in self._state.tensors]
        theirs = RecurrentState(before[0], before[1] if len(before) > 1 else None)
        pairs = [(self.run(), self._layer.reference(*self._inputs, theirs, self._rows))]
        pairs += zip(self._state.tensors, theirs.tensors, strict=True)
        return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
