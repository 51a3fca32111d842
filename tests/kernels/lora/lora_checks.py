"""LoRA adapters on GPUs: shrink_expand.py beside the reference. Run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.lora.lora_linear import LoraPart, lora_reference
from coatcheck.kernels.lora.lora_step import LoraRows, LoraStep
from coatcheck.kernels.lora.lora_tiles import LoraTiles, pack_tiles, view_tiles
from coatcheck.kernels.lora.shrink_expand import _SPLIT_ROWS, StackedLora
from tests.kernels.layers.quantised_weights import random_weight

_ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (features, depth, ranks of the parts, their columns): a number of columns that nothing divides; several units.
_SHAPES = (
    (70, 90, ((0, 17), (17, 40), (60, 10))),
    (304, 1200, ((0, 160), (160, 144))),
)
_RANKS = ((4, 4, 7), (1, 0, 0), (16, 70, 3), (0, 0, 0), (0, 33, 8))  # of the parts of each adapter; 0: it has none


def lora(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Several adapters of different ranks in one step, some with a part of the columns or with none."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for features, depth, columns in _SHAPES:
            adapters = _adapters(depth, columns, dtype)
            step, weight = LoraStep(), (torch.randn(features, depth) / depth**0.5).to(dtype)
            linear = PackedLinear(weight, batch_invariant=True)
            linear.lora = lora = StackedLora(step, adapters, (features, depth), dtype, weight.device)
            for rows in (1, 8, 37, _SPLIT_ROWS + 5):
                x = torch.randn(rows, depth).to(dtype)
                plain = linear(x)
                chosen = torch.randint(0, len(adapters) + 1, (rows,)).tolist()
                _check_rows(linear, adapters, x, plain, chosen)
            lora.compile_kernels()
            _check_order(linear, x, plain, chosen)
    _check_quantised(dtypes[-1])


def _adapters(depth: int, columns: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[list[LoraPart]]:
    def draw(rows: int, columns: int, size: int) -> Tensor:
        return torch.randn(rows, columns).div(size**0.5).to(dtype)

    return [
        [
            LoraPart(draw(rank, depth, depth), draw(rank, width, rank), column)
            for rank, (column, width) in zip(ranks, columns, strict=False)
            if rank
        ]
        for ranks in _RANKS
    ]


def _tiles(chosen: Sequence[int], device: torch.device) -> LoraTiles:
    packed = torch.from_numpy(pack_tiles(np.array(chosen, np.int32), len(_RANKS)))
    return view_tiles(packed.to(device), len(chosen))


def _product(linear: PackedLinear, x: Tensor, chosen: Sequence[int]) -> Tensor:
    assert linear.lora is not None
    with linear.lora.step.use_tiles(_tiles(chosen, x.device)):
        y: Tensor = linear(x)
    return y


def _check_rows(
    linear: PackedLinear, adapters: list[list[LoraPart]], x: Tensor, plain: Tensor, chosen: list[int]
) -> None:
    """The formula; rows without an adapter, and all rows of a step without adapters, keep their bits."""
    expected, rounding = plain.clone(), _ROUNDING[x.dtype]
    rows = LoraRows.select(chosen)
    lora_reference(adapters, x, expected, rows)
    found = _product(linear, x, chosen)
    torch.testing.assert_close(found.float(), expected.float(), rtol=rounding, atol=rounding)
    none = torch.tensor([not adapter or not adapters[adapter - 1] for adapter in chosen], device=x.device)
    assert torch.equal(found[none], plain[none])
    assert len(rows.rows) < len(x) // 2 or not torch.equal(found, plain)
    assert torch.equal(_product(linear, x, [0] * len(x)), plain) and torch.equal(linear(x), plain)


def _check_order(linear: PackedLinear, x: Tensor, plain: Tensor, chosen: list[int]) -> None:
    """A row has the same bits alone, beside other rows and adapters, and in steps of few rows and of many."""
    whole = _product(linear, x, chosen)
    for first, last in ((0, 1), (3, 4), (5, 40)):
        assert torch.equal(_product(linear, x[first:last], chosen[first:last]), whole[first:last])
    order = torch.randperm(len(x), device="cpu")
    assert torch.equal(_product(linear, x[order], [chosen[i] for i in order.tolist()]), whole[order])
    beside = [adapter if index == 3 else 1 + index % len(_RANKS) for index, adapter in enumerate(chosen)]
    assert torch.equal(_product(linear, x, beside)[3], whole[3])
    assert torch.equal(_product(linear, x, [chosen[3]] * len(x))[3], whole[3])


def _check_quantised(dtype: torch.dtype) -> None:
    """Over a quantised weight whose linear quantises x too, adapters read x itself."""
    weight = random_weight(CodeKind.INT8, 64, 128, 128, dtype)
    linear = PackedLinear(replace(weight, quantises_activations=True))
    assert linear.row_format is not None and linear.input_format == linear.row_format
    adapters = _adapters(128, ((0, 64),), dtype)
    x = torch.randn(20, 128).to(dtype)
    plain = linear(x)
    linear.lora = StackedLora(LoraStep(), adapters, (64, 128), dtype, x.device)
    assert linear.input_format is None
    _check_rows(linear, adapters, x, plain, [index % (len(_RANKS) + 1) for index in range(len(x))])
