"""Mixtures of experts for bench/gpu.py: error, and time over the roof, in the forms that checkpoints have.

The roof is that of reading the experts which some token chose, or that of the products. The calls take several choices
of experts in turn, so that few tokens do not find their experts in the L2 cache.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import Roofs, in_turn, seconds
from coatcheck.bench.gpu_cases.linears import FP8_BLOCKS, INT4, MXFP4, W8A8, WeightForm
from coatcheck.bench.gpu_cases.table import Measurement, or_failure
from coatcheck.kernels.layers.experts import PackedExperts, activate
from coatcheck.kernels.layers.quantised_experts import QuantisedExperts
from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows_reference

_BF16 = torch.bfloat16
_CHOICES = 8  # which calls take in turn
_CHECKED = 4  # tokens
_TOLERANCE = 0.02
_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss


class Mixture(NamedTuple):
    """A layer's sizes. `forms`: of its weights; None: plain bfloat16."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    forms: tuple[WeightForm | None, ...]
    activation: str = "silu"


_W8A8 = W8A8[1]
_MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768, (None, INT4, _W8A8, FP8_BLOCKS, MXFP4)),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, (MXFP4,), "clamped_swiglu"),
    Mixture("Mixtral", 8, 2, 4096, 14336, (None, INT4)),
)
_TOKENS: tuple[int, ...] = (1, 16, 64, 512, 4096)


def experts(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Every form on the experts of Qwen3-30B-A3B, and those that gpt-oss and Mixtral have. `beside` is bfloat16."""
    mixtures: tuple[Mixture, ...] = _MIXTURES
    counts = _TOKENS
    if quick:
        counts = (1, 20)
        mixtures = (
            Mixture("small", 6, 2, 128, 256, _MIXTURES[0].forms),
            Mixture("small, clamped", 6, 2, 128, 256, (MXFP4,), "clamped_swiglu"),
        )
    for mixture in mixtures:
        plain: dict[int, float] = {}
        for form in mixture.forms:
            rows = _measure(mixture, form, counts, plain, device, roofs)
            yield from or_failure("experts", f"{mixture.name}, {'bf16' if form is None else form.name}", rows)


def _measure(
    mixture: Mixture, form: WeightForm | None, counts: tuple[int, ...], plain: dict[int, float], device: torch.device,
    roofs: Roofs,
) -> Iterator[Measurement]:  # fmt: skip
    """`plain`: seconds of bfloat16 by the number of tokens; the rows of bfloat16 set them."""
    layer = _Layer(mixture, form, device)
    for tokens in counts:
        took, floor, error = layer.measure(tokens, device, roofs)
        if form is None:
            plain[tokens] = took
        beside = plain.get(tokens) if form is not None else None
        yield Measurement(
            "experts", f"{mixture.name}, {tokens} tokens, {'bf16' if form is None else form.name}", took * 1e3,
            floor / took, error, "bf16" if beside else "", beside and beside * 1e3, f"error <= {_TOLERANCE:g}",
            error <= _TOLERANCE,
        )  # fmt: skip


class _Layer:
    """The experts of a layer with random weights. gpt-oss' have biases."""

    def __init__(self, mixture: Mixture, form: WeightForm | None, device: torch.device) -> None:
        torch.manual_seed(0)
        count, _, hidden, inner = mixture[1:5]
        self._mixture, self._form = mixture, form
        self._gate_up, self._down = (
            _draw(form, count, rows, columns, device) for rows, columns in ((2 * inner, hidden), (hidden, inner))
        )
        has_bias = mixture.activation == "clamped_swiglu"
        self._biases = tuple(
            torch.randn(count, width, device=device).to(_BF16) if has_bias else None for width in (2 * inner, hidden)
        )
        self._packed = PackedExperts(
            self._gate_up, self._down, top_k=mixture.top_k, gate_up_bias=self._biases[0], down_bias=self._biases[1],
            activation=mixture.activation, alpha=_ALPHA, limit=_LIMIT,
        )  # fmt: skip

    def measure(self, tokens: int, device: torch.device, roofs: Roofs) -> tuple[float, float, float]:
        """(seconds, seconds at the roof, error)."""
        count, top_k, hidden, inner = self._mixture[1:5]
        x = torch.randn(tokens, hidden, device=device).to(_BF16)
        choices = [torch.rand(tokens, count, device=device).topk(top_k).indices.int() for _ in range(_CHOICES)]
        weights = torch.rand(tokens, top_k, device=device).softmax(1)
        took = seconds(in_turn([partial(self._packed, x, ids, weights) for ids in choices]), device, times=_CHOICES)
        touched = sum(len(ids.unique()) for ids in choices) / _CHOICES
        of_each = sum(part.nbytes for parts in self._packed.parts for part in parts) / count
        operations = 2 * tokens * top_k * 3 * hidden * inner
        floor = roofs.floor(touched * of_each, operations, of_8_bits=self._packed.row_format is not None)
        have = self._packed(x, choices[0], weights)[:_CHECKED].float()
        want = self._reference(x[:_CHECKED], choices[0][:_CHECKED], weights[:_CHECKED])
        return took, floor, float((have - want).norm() / want.norm())

    def _reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A loop over the experts, float32. What the kernels round to bfloat16 or to codes, is rounded here too."""
        formats = [None if choice is None else choice.format for choice in self._packed.activations]
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in ids.unique().tolist():
            gate_up, down = (_plain_of(part, expert) for part in (self._gate_up, self._down))
            biases = [0.0 if bias is None else bias[expert].float() for bias in self._biases]
            wide = _as_read(x, formats[0]) @ gate_up.T + biases[0]
            gated = activate(wide, self._mixture.activation, _ALPHA, _LIMIT).to(_BF16)
            y = (_as_read(gated, formats[1]) @ down.T + biases[1]).to(_BF16).float()
            out += ((ids == expert) * weights).sum(1, keepdim=True) * y
        return out


def _draw(
    form: WeightForm | None, count: int, rows: int, columns: int, device: torch.device
) -> Tensor | QuantisedExperts:
    if form is not None:
        return QuantisedExperts(count, form.draw(count * rows, columns, device))
    weight = torch.empty(count, rows, columns, dtype=_BF16, device=device)
    return weight.normal_(std=columns**-0.5)


def _plain_of(weight: Tensor | QuantisedExperts, expert: int) -> Tensor:
    """float32 [rows, columns] of one expert."""
    if isinstance(weight, Tensor):
        return weight[expert].float()
    return weight.select_experts(expert, expert + 1).stacked.dequantise(torch.float32)


def _as_read(x: Tensor, format: RowFormat | None) -> Tensor:
    """float32 of x as a product reads it."""
    return x.float() if format is None else quantise_rows_reference(x, format).dequantise()
