"""Linears over integer codes where x becomes integers of 16 bits (AVX2, AVX-512), against their definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from coatcheck.kernels import native
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from tests.kernels.layers.quantised_weights import random_weight

_library = native.library()
_INTEGER_CLASSES = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")
_CLASSES = [] if _library is None else [name for name in _library.available if name in _INTEGER_CLASSES]
pytestmark = [
    pytest.mark.usefixtures("cpu_class"),
    pytest.mark.parametrize("cpu_class", _CLASSES, indirect=True, scope="module"),
]

KINDS = [CodeKind.INT8, CodeKind.INT4, CodeKind.FP4]


def integer_product(weight: QuantisedWeight, x: torch.Tensor) -> torch.Tensor:
    """The definition in kernels/csrc/integer_rows.h, in float32."""
    if weight.order is not None:
        x, weight = x[:, weight.order.long()], replace(weight, order=None)
    scales = weight.without_row_scales().scales
    numbers = replace(weight, scales=torch.ones(scales.shape), row_scales=None).dequantise(torch.float64)
    y = torch.zeros(len(x), weight.shape[0])
    for start in range(0, weight.shape[1], weight.group):
        stop = min(start + weight.group, weight.shape[1])
        for first in range(start, stop, 128):
            chunk = x[:, first : min(first + 128, stop)].double()
            largest = chunk.abs().amax(1, keepdim=True)
            unit = torch.exp2(
                (torch.frexp(largest).exponent - 1).where(largest > 0, -100).clamp(min=-100).double() - 14
            )
            sums = ((chunk / unit).round() @ numbers[:, first : min(first + 128, stop)].T).float() * unit.float()
            scale = scales[:, start // weight.group]
            y = (sums.double() * scale.double() + y.double()).float()
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize(
    ("depth", "group"), [(130, 130), (208, 16), (400, 40), (416, 32), (600, 200), (640, 128), (960, 320)]
)
def test_integer_products_have_the_bits_of_their_definition(
    kind: CodeKind, outlier: float, depth: int, group: int
) -> None:
    """For any number of rows. The error is below that of rounding the exact results to bfloat16, also where a column of
    x is 1,000 times as large as the others."""
    torch.manual_seed(depth)
    has_zeros, is_ordered = group in (40, 320) and kind != CodeKind.FP4, group == 32
    scales = torch.float8_e4m3fn if group == 16 else torch.float32
    weight = random_weight(
        kind, 70, depth, group, torch.bfloat16, scales=scales, has_zeros=has_zeros, is_ordered=is_ordered
    )
    bias = torch.randn(70).bfloat16()
    linear = PackedLinear(weight, bias)
    for rows in (1, 2, 3, 7, 70):
        x = torch.randn(rows, depth) * torch.logspace(-3, 3, rows)[:, None]
        x[:, 77] *= outlier
        x = x.bfloat16()
        defined = integer_product(weight, x)
        exact = x.double() @ weight.dequantise(torch.float64).T
        assert (defined - exact).norm() < (exact.bfloat16() - exact).norm()
        assert torch.equal(linear(x), (defined + bias.float()).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_any_size_meet_integer_codes(kind: CodeKind) -> None:
    """Rows of zeros, of tiny and of huge numbers give their products; a NaN or an infinity stays in its row."""
    weight = random_weight(kind, 64, 256, 128, torch.bfloat16)
    linear, x = PackedLinear(weight), torch.randn(6, 256)
    x *= torch.tensor([0.0, 1e-38, 1e-25, 1.0, 1e35, 1.0])[:, None]
    x = x.bfloat16()
    x[5, 200] = float("nan")
    y, exact = linear(x), F.linear(x.float(), weight.dequantise(torch.float32))
    assert torch.equal(y[0], torch.zeros(64).bfloat16()) and y[1].abs().max() < 1e-33 and y[5].isnan().all()
    torch.testing.assert_close(y[2:5].float(), exact[2:5], rtol=1 / 64, atol=0.02 * float(exact[3].abs().max()))
    for row, size in ((2, 1e-25), (4, 1e35)):
        torch.testing.assert_close(y[row].float() / size, exact[row] / size, rtol=1 / 64, atol=0.1)
    x[5, 200] = float("inf")
    assert not linear(x)[5].isfinite().any()
    assert torch.equal(linear(x)[:5], y[:5])
