"""Quantised linears, and what LoRA adapters add to linears, for bench/gpu.py, on the shapes of an 8B llama: error, time
over the roof, and cuBLAS beside.

Every form has several weights, which the calls take in turn, so that each call reads its weight from memory as a layer
of a model does. A weight's bytes are those that the GPU holds, scales included.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import UNCACHED, Roofs, in_turn, seconds
from coatcheck.bench.gpu_cases.table import Measurement, or_failure
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_rows import QuantisedRows, quantise_rows
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from coatcheck.kernels.lora.lora_linear import LoraLinear, LoraPart, lora_reference
from coatcheck.kernels.lora.lora_step import LoraRows, LoraStep
from coatcheck.kernels.lora.lora_tiles import pack_tiles, view_tiles
from coatcheck.kernels.lora.shrink_expand import StackedLora

_BF16 = torch.bfloat16
_MOST_WEIGHTS = 24
_TOLERANCE = 0.02
_SHAPES = ((4096, 6144), (4096, 28672), (14336, 4096))  # of QKV, gate_up and down: depth, features
_ROWS = (1, 16, 64, 256, 2048)
_ADAPTERS = 8


class WeightForm(NamedTuple):
    """How a checkpoint stores weights. `group`: columns that share a scale; 0: a whole row. `scales`: their dtype.
    `has_blocks`: 128 rows share a scale, too. `quantises_activations`: W8A8."""

    name: str
    kind: CodeKind
    group: int
    scales: torch.dtype = torch.float32
    has_zeros: bool = False
    has_blocks: bool = False
    quantises_activations: bool = False

    def draw(self, rows: int, columns: int, device: torch.device) -> QuantisedWeight:
        """A random weight [rows, columns], whose elements have a variance of about 1 / columns."""
        values = torch.randn(rows, columns, device=device)
        match self.kind:
            case CodeKind.INT8:
                codes, spread = (values * 32).round().clamp(-127, 127).to(torch.int8), 32.0
            case CodeKind.FP8:
                codes, spread = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), 100.0  # above is NaN
            case CodeKind.INT4:
                codes, spread = (values * 3).round().clamp(-8, 7).to(torch.int8), 3.0
            case CodeKind.FP4:
                codes, spread = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device), 3.0
        del values
        group = self.group or columns
        shape = (-(-rows // 128) if self.has_blocks else rows, -(-columns // group))
        factors = (torch.rand(shape, device=device) + 0.5) / spread / columns**0.5
        if self.scales == torch.uint8:
            scales = (127 + factors.log2().round()).to(torch.uint8)
        elif self.scales == torch.float8_e4m3fn:  # NVFP4: multiplied with a scale of the whole weight
            scales, factors = (100 * factors / factors.amax()).to(self.scales), factors.amax().view(1, 1) / 100
        else:
            scales = factors.to(self.scales)
        if self.has_blocks:
            scales = scales.repeat_interleave(128, 0)[:rows]
        zeros = torch.randint(-3, 4, shape, dtype=torch.int8, device=device) if self.has_zeros else None
        weight = QuantisedWeight.of_codes(self.kind, codes, scales, group, _BF16, zeros)
        if self.scales == torch.float8_e4m3fn:
            weight = replace(weight, row_scales=factors.expand(rows, 1).contiguous())
        return replace(weight, quantises_activations=self.quantises_activations)


INT4 = WeightForm("int4, groups of 128", CodeKind.INT4, 128, _BF16)
INT4_ZEROS = WeightForm("int4, groups of 128, zeros", CodeKind.INT4, 128, torch.float16, has_zeros=True)
INT8 = WeightForm("int8 by channel", CodeKind.INT8, 0)
FP8 = WeightForm("fp8 by channel", CodeKind.FP8, 0)
FP8_BLOCKS = WeightForm("fp8, blocks of 128", CodeKind.FP8, 128, has_blocks=True)
MXFP4 = WeightForm("MXFP4", CodeKind.FP4, 32, torch.uint8)
NVFP4 = WeightForm("NVFP4", CodeKind.FP4, 16, torch.float8_e4m3fn)
W8A8 = tuple(form._replace(name=f"W8A8, {form.name}", quantises_activations=True) for form in (FP8, FP8_BLOCKS, INT8))


def linears(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """The plain linear in a fixed order and every form of weights, over bfloat16 rows."""
    beside = _CuBlas(device)
    shapes, rows = (((256, 384),), (1, 20)) if quick else (_SHAPES, _ROWS)
    for index, (depth, features) in enumerate(shapes):
        forms = (None, INT4, INT4_ZEROS, INT8, FP8, FP8_BLOCKS, MXFP4, NVFP4) if index == 0 else (INT4, FP8)
        for form in forms:
            what = f"{depth} -> {features}, {_name(form)}"
            yield from or_failure(
                "linears", what, _measure("linears", form, (features, depth), rows, beside, device, roofs)
            )


def w8a8(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Products of 8-bit codes, with rows that the kernel before has quantised. Operations are held against twice the
    rate of bfloat16 products."""
    beside = _CuBlas(device)
    shapes, rows = (((256, 384),), (1, 20)) if quick else (_SHAPES, _ROWS)
    for index, (depth, features) in enumerate(shapes):
        for form in W8A8 if index == 0 else W8A8[:1]:
            what = f"{depth} -> {features}, {form.name}"
            yield from or_failure("w8a8", what, _measure("w8a8", form, (features, depth), rows, beside, device, roofs))


def adapters(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """What adapters add to a linear: rows have one of 8 in turn, all have the same one, or none has one."""
    for depth, features in ((256, 384),) if quick else _SHAPES:
        for rank in (16, 64):
            what = f"{depth} -> {features}, rank {rank}"
            rows = (1, 20) if quick else _ROWS
            yield from or_failure("adapters", what, _adapted((depth, features), rank, rows, device, roofs))


def _adapted(
    shape: tuple[int, int], rank: int, row_counts: tuple[int, ...], device: torch.device, roofs: Roofs
) -> Iterator[Measurement]:
    torch.manual_seed(0)
    (depth, features), on_gpu, step = shape, device.type == "cuda", LoraStep()

    def random(rows: int, columns: int, size: int) -> Tensor:
        return torch.randn(rows, columns, device=device).div(size**0.5).to(_BF16)

    linear, dtype = PackedLinear(_plain(features, depth, device)), _BF16 if on_gpu else torch.float32
    parts = [
        [LoraPart(random(rank, depth, depth).to(dtype), random(rank, features, rank).to(dtype))]
        for _ in range(_ADAPTERS)
    ]
    lora = (
        StackedLora(step, parts, (features, depth), _BF16, device)
        if on_gpu
        else LoraLinear(step, parts, (features, depth), _BF16)
    )
    for count in row_counts:
        x = random(count, depth, 1)
        alone = seconds(partial(linear, x), device)
        for number in (_ADAPTERS, 1, 0):
            chosen = [1 + row % number if number else 0 for row in range(count)]
            tiles = torch.from_numpy(pack_tiles(np.array(chosen, np.int32), _ADAPTERS)).to(device)
            y, want = (torch.zeros((count, features), dtype=_BF16, device=device) for _ in range(2))
            with step.use_tiles(view_tiles(tiles, count)) if on_gpu else step.use(chosen):
                lora.add_to(y, x)
                few = slice(0, 64)  # the reference computes row by row
                lora_reference(parts, x[few], want[few], LoraRows.select(chosen[few]))
                error = float((y[few].float() - want[few].float()).abs().max() / want[few].abs().max().clamp(min=1))
                took = seconds(partial(lora.add_to, y, x), device)
            size = x.element_size() * rank * (depth + features)
            moved = min(count, number) * size + (x.nbytes + 2 * y.nbytes if number else 0)
            floor = roofs.floor(moved, 2 * count * rank * (depth + features) if number else 0)
            yield Measurement(
                "adapters", f"{count} of {depth} -> {features}, rank {rank}, {number} adapters", took * 1e3,
                floor / took, error, "the linear alone", alone * 1e3, f"error <= {_TOLERANCE:g}", error <= _TOLERANCE,
            )  # fmt: skip


def _measure(
    part: str, form: WeightForm | None, shape: tuple[int, int], row_counts: tuple[int, ...], beside: "_CuBlas",
    device: torch.device, roofs: Roofs,
) -> Iterator[Measurement]:  # fmt: skip
    """`form` None: a plain weight in bfloat16, whose sums have a fixed order."""
    torch.manual_seed(0)
    features, depth = shape
    first = _plain(features, depth, device) if form is None else form.draw(features, depth, device)
    exact = first.float() if isinstance(first, Tensor) else first.dequantise(torch.float32)
    layers = [PackedLinear(first, batch_invariant=form is None)]
    size = sum(part.nbytes for part in layers[0].parts)
    while device.type == "cuda" and len(layers) * size < UNCACHED and len(layers) < _MOST_WEIGHTS:
        another = _plain(features, depth, device) if form is None else form.draw(features, depth, device)
        layers.append(PackedLinear(another, batch_invariant=form is None))
    for count in row_counts:
        x = torch.randn(count, depth, device=device).to(_BF16)
        format = layers[0].row_format
        rows: Tensor | QuantisedRows = x if format is None else quantise_rows(x, format)
        wide = rows.dequantise() if isinstance(rows, QuantisedRows) else rows.float()
        want = wide @ exact.T
        error = float((layers[0](rows).float() - want).abs().max() / want.abs().max())
        took = seconds(in_turn([partial(layer, rows) for layer in layers]), device, times=max(5, len(layers)))
        moved = size + count * (depth * (1 if format else 2) + features * 2)
        floor = roofs.floor(moved, 2 * count * depth * features, of_8_bits=format is not None)
        yield Measurement(
            part, f"{count} of {depth} -> {features}, {_name(form)}", took * 1e3, floor / took, error, "cuBLAS bf16",
            beside.seconds(count, features, depth) * 1e3, f"error <= {_TOLERANCE:g}", error <= _TOLERANCE,
        )  # fmt: skip


class _CuBlas:
    """Seconds of `F.linear` over plain weights, measured once for each shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[int, int, int], float] = {}

    def seconds(self, rows: int, features: int, depth: int) -> float:
        key = (rows, features, depth)
        if key not in self._found:
            count = -(-UNCACHED // (2 * features * depth)) if self._device.type == "cuda" else 1
            weights = [_plain(features, depth, self._device) for _ in range(count)]
            x = torch.randn(rows, depth, device=self._device).to(_BF16)
            works = [partial(F.linear, x, weight) for weight in weights]
            self._found[key] = seconds(in_turn(works), self._device, times=max(5, count))
        return self._found[key]


def _name(form: WeightForm | None) -> str:
    return "bf16 in a fixed order" if form is None else form.name


def _plain(features: int, depth: int, device: torch.device) -> Tensor:
    return torch.empty(features, depth, dtype=_BF16, device=device).normal_(std=depth**-0.5)
