"""PackedLinear against float32 torch, and the guarantees of its native form."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.linear import PackedLinear
from tests.examples import pairwise
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("linear_bf16")]

ROWS = [0, 1, 2, 3, 6, 7, 12, 13, 16, 24, 25, 33, 100]


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16, torch.float16]),
    ("features, depth", [(1, 1), (17, 33), (64, 40), (100, 30), (129, 257)]),
    ("with_bias", [False, True]),
)
def test_agrees_with_float32(dtype: torch.dtype, features: int, depth: int, with_bias: bool) -> None:
    """The product of any number of rows and features, odd ones included, is that of float32 rounded once."""
    torch.manual_seed(features)
    weight, bias = torch.randn(features, depth).to(dtype), torch.randn(features).to(dtype) if with_bias else None
    linear = PackedLinear(weight, bias)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for rows in ROWS:
        x = torch.randn(rows, depth + 3).to(dtype)[:, :depth]
        want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        have = linear(x)
        assert have.dtype == dtype and have.is_contiguous()
        torch.testing.assert_close(have.float(), want, rtol=tolerance / 4, atol=tolerance)


def test_leading_dimensions_are_kept() -> None:
    """An input [1, T, in] gives [1, T, out]. Transposed inputs are accepted."""
    linear = PackedLinear(torch.eye(32).bfloat16())
    x = torch.randn(2, 5, 32).bfloat16()
    assert torch.equal(linear(x), x)
    assert torch.equal(linear(x.transpose(0, 1)), x.transpose(0, 1))
    assert linear(x[:, :0]).shape == (2, 0, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_never_depends_on_its_neighbours(dtype: torch.dtype) -> None:
    """In the native form the result of a row has the same bits alone and in any batch."""
    linear = PackedLinear(torch.randn(144, 96).to(dtype))
    assert linear.form == "native"
    x = torch.randn(200, 96).to(dtype)
    whole = linear(x)
    for first, last in ((0, 1), (5, 12), (100, 124), (3, 199)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


def test_the_plain_weight_is_not_kept() -> None:
    """After packing, the module holds no reference to the plain weight."""
    import weakref

    weight = torch.randn(64, 64).bfloat16()
    gone = weakref.ref(weight)
    linear = PackedLinear(weight)
    del weight
    gc.collect()
    assert linear.form == "plain" or gone() is None
    assert linear.weight_shape == (64, 64)


def test_wrong_inputs_are_refused_by_name() -> None:
    """A wrong dtype, depth, bias or weight is refused, and the message says what was expected."""
    linear = PackedLinear(torch.randn(8, 16).bfloat16())
    for x in (torch.randn(2, 16), torch.randn(2, 15).bfloat16()):
        with pytest.raises(LaunchRefused, match="^x: expected "):
            linear(x)
    with pytest.raises(LaunchRefused, match="^bias: expected "):
        PackedLinear(torch.randn(8, 16), torch.randn(9))
    with pytest.raises(LaunchRefused, match="^weight: expected "):
        PackedLinear(torch.randn(8))
