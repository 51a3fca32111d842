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
    scales = weight.without_row_scales().scales.float()
    unscaled, products = replace(weight, scales=torch.ones(scales.shape), row_scales=None), None
    if weight.zeros is not None and weight.zeros.is_floating_point():
        unscaled, products = replace(unscaled, zeros=None), weight.zeros.float() * scales
    numbers = unscaled.dequantise(torch.float64)
    y = torch.zeros(len(x), weight.shape[0])
    for span in spans_of(*weight.shape[1:], weight.group):
        quantised = [quantise_chunk(x[:, first:stop]) for first, stop in span]
        for (first, _), (q, unit) in zip(span, quantised, strict=True):
            if products is not None:
                y = (y.double() - q.sum(1, keepdim=True) * unit * products[:, first // weight.group].double()).float()
        for (first, stop), (q, unit) in zip(span, quantised, strict=True):
            sums = (q @ numbers[:, first:stop].T).float() * unit.float()
            y = (sums.double() * scales[:, first // weight.group].double() + y.double()).float()
    return y


def spans_of(depth: int, group: int) -> list[list[tuple[int, int]]]:
    """Chunks [first, stop) of at most 128 columns of a group, in spans: as many as have at most 128 columns together.
    The last chunk counts with its padding."""
    spans: list[list[tuple[int, int]]] = []
    for start in range(0, depth, group):
        for first in range(start, min(start + group, depth), 128):
            stop = min(first + 128, start + group, depth)
            end = -(-depth // 32) * 32 if stop == depth else stop
            if spans and end - spans[-1][0][0] <= 128:
                spans[-1].append((first, stop))
            else:
                spans.append([(first, stop)])
    return spans


def quantise_chunk(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, u [rows, 1]) of the columns of a chunk, in float64."""
    largest = x.double().abs().amax(1, keepdim=True)
    unit = torch.exp2((torch.frexp(largest).exponent - 1).where(largest > 0, -100).clamp(min=-100).double() - 14)
    return (x.double() / unit).round(), unit


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
    zeros = torch.int8 if group in (40, 320) and kind != CodeKind.FP4 else None
    scales = torch.float8_e4m3fn if group == 16 else torch.float32
    is_ordered = group == 32
    weight = random_weight(kind, 70, depth, group, torch.bfloat16, scales=scales, zeros=zeros, is_ordered=is_ordered)
    check_bits(weight, outlier)


@pytest.mark.parametrize("kind", [CodeKind.INT8, CodeKind.INT4])
@pytest.mark.parametrize("zeros", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("depth", "group"), [(208, 16), (320, 32), (448, 64), (640, 128), (600, 200), (130, 130)])
def test_zero_points_may_be_fractions(kind: CodeKind, zeros: torch.dtype, depth: int, group: int) -> None:
    """The products have the bits of their definition, also with scales of rows and with columns in any order."""
    torch.manual_seed(depth)
    scales = torch.float8_e4m3fn if group == 64 else zeros
    is_ordered = group == 32
    weight = random_weight(kind, 70, depth, group, torch.bfloat16, scales=scales, zeros=zeros, is_ordered=is_ordered)
    check_bits(weight, 1.0)


def check_bits(weight: QuantisedWeight, outlier: float) -> None:
    """`outlier`: what a column of x is multiplied with."""
    features, depth = weight.shape
    bias = torch.randn(features).bfloat16()
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
