"""The low-rank parts of adapters: the formula, rows without adapters, and independence of the other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.lora.lora_linear import LoraLinear, LoraPart, lora_reference
from coatcheck.kernels.lora.lora_step import LoraRows, LoraStep
from tests.kernels.cpu_classes import each_class

DEPTH, FEATURES = 83, 391  # tails behind whole vectors and tiles


def _part(rank: int, features: int, column: int = 0) -> LoraPart:
    return LoraPart(torch.randn(rank, DEPTH), torch.randn(rank, features), column)


def _adapters() -> list[list[LoraPart]]:
    """Three adapters: two parts with a gap between them, none, and one over all columns."""
    return [[_part(7, 300), _part(4, 60, 331)], [], [_part(9, FEATURES)]]


def _linear(dtype: torch.dtype) -> tuple[PackedLinear, LoraStep]:
    linear, step = PackedLinear(torch.randn(FEATURES, DEPTH).to(dtype)), LoraStep()
    linear.lora = LoraLinear(step, _adapters(), linear.weight_shape, dtype)
    return linear, step


@each_class("lora")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_add_their_product(dtype: torch.dtype, cpu_class: str) -> None:
    """Each row gets the product of its own adapter, also in strided rows, and rows without one keep their bits."""
    torch.manual_seed(0)
    linear, step = _linear(dtype)
    x = torch.randn(9, 2 * DEPTH).to(dtype)[:, :DEPTH]
    adapters = [0, 3, 1, 2, 1, 1, 0, 3, 3]
    plain = linear(x)
    with step.use(adapters):
        y = linear(x)
    expected = plain.clone()
    assert isinstance(linear.lora, LoraLinear)
    lora_reference(linear.lora.adapters, x, expected, LoraRows.select(adapters))
    for row, adapter in enumerate(adapters):
        if adapter in (0, 2):
            assert torch.equal(y[row], plain[row])
    torch.testing.assert_close(y, expected, rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=2e-4)
    assert torch.equal(linear(x), plain), "a step without adapters"


@each_class("lora")
def test_a_row_does_not_depend_on_the_others(cpu_class: str) -> None:
    """A row's bits are the same alone, beside other adapters, and in a long prompt on several threads."""
    torch.manual_seed(1)
    linear, step = _linear(torch.bfloat16)
    x = torch.randn(70, DEPTH).bfloat16()

    def rows(chosen: list[int], adapters: list[int]) -> Tensor:
        with step.use(adapters):
            y: Tensor = linear(x[chosen])
        return y

    many = rows([*range(70)], [1 + index % 3 for index in range(70)])
    for row in (0, 2, 34, 69):
        assert torch.equal(rows([row], [1 + row % 3])[0], many[row])
    assert torch.equal(rows([3, 5, 0], [0, 2, 1])[2], many[0])


def test_the_last_layer_selects_rows() -> None:
    """A linear behind the selection of sampled tokens has the adapters of those tokens."""
    linear, step = _linear(torch.float32)
    x = torch.randn(5, DEPTH)
    with step.use([1, 1, 0, 3, 3], [0, 3]):
        whole, selected = linear(x), linear(x[[2, 4]])
        assert linear(x[:0].new_empty((2, DEPTH))).shape == (2, FEATURES)
    torch.testing.assert_close(selected, whole[[2, 4]])
    assert not step.is_active
    with pytest.raises(ValueError, match="must be fewer"), step.use([1, 1], [1, 1]):
        pass


def test_wrong_parts_are_refused() -> None:
    """A part of another depth, or beyond the columns of the linear, is refused with its name."""
    step, shape = LoraStep(), (FEATURES, DEPTH)
    with pytest.raises(LaunchRefused, match="A: expected shape"):
        LoraLinear(step, [[LoraPart(torch.randn(4, 5), torch.randn(4, 8))]], shape, torch.float32)
    with pytest.raises(LaunchRefused, match="at most 91 features"):
        LoraLinear(step, [[_part(4, 92, 300)]], shape, torch.float32)
    with pytest.raises(LaunchRefused, match="dtype"):
        LoraLinear(step, [[_part(4, 8)]], shape, torch.float16)
    assert native.library() is not None
