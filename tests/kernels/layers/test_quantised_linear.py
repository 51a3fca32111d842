"""Linears over quantised weights against linears over the dequantised ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from coatcheck.kernels.layers import quantised_linear
from coatcheck.kernels.layers.linear import PackedLinear, holds_quantised
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from tests.kernels.cpu_classes import each_class
from tests.kernels.layers.quantised_weights import multiplies_rounded_weights, random_weight

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("linear_bf16")]

ROWS = [1, 7, 40]
SHAPES = [  # features, depth, group
    (100, 130, 130), (129, 256, 128), (17, 200, 40), (70, 208, 16), (40, 320, 64), (64, 288, 32),
    (65, 131, 131),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "scales", "zeros"),
    [
        (CodeKind.INT8, torch.float32, None),
        (CodeKind.INT8, torch.bfloat16, torch.int8),
        (CodeKind.INT8, torch.bfloat16, torch.float32),
        (CodeKind.INT4, torch.float16, None),
        (CodeKind.INT4, torch.bfloat16, torch.int8),
        (CodeKind.INT4, torch.float32, torch.float32),
        (CodeKind.INT4, torch.float16, torch.float16),
        (CodeKind.FP8, torch.float32, None),
        (CodeKind.FP8, torch.uint8, None),
        (CodeKind.FP4, torch.uint8, None),
        (CodeKind.FP4, torch.float32, None),
        (CodeKind.FP4, torch.float8_e4m3fn, None),
        (CodeKind.INT4, torch.float8_e4m3fn, torch.int8),
        (CodeKind.INT8, torch.float8_e4m3fn, torch.float32),
    ],
)
def test_the_product_is_that_of_the_dequantised_weight(
    dtype: torch.dtype, kind: CodeKind, scales: torch.dtype, zeros: torch.dtype | None
) -> None:
    """A quantised weight gives the bits that its dequantised weight gives. Classes that multiply codes instead multiply
    the sum of each group with its scale, so there the result lies as near to the float32 product as a rounded sum
    can."""
    torch.manual_seed(kind)
    for features, depth, group in SHAPES:
        weight = random_weight(kind, features, depth, group, dtype, scales=scales, zeros=zeros)
        bias = torch.randn(features).to(dtype)
        quantised, plain = PackedLinear(weight, bias), PackedLinear(weight.dequantise(), bias)
        for rows in ROWS:
            x = torch.randn(rows, depth).to(dtype)
            if dtype == torch.float32 or multiplies_rounded_weights():
                assert torch.equal(quantised(x), plain(x))
                continue
            exact = F.linear(x.float(), weight.dequantise(torch.float32), bias.float())
            torch.testing.assert_close(quantised(x).float(), exact, rtol=1 / 128, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CodeKind)
@pytest.mark.parametrize(
    ("depth", "group"), [(96, 32), (208, 16), (400, 40), (416, 416)]
)  # more depth than is unpacked at a time
def test_a_row_never_depends_on_its_neighbours(dtype: torch.dtype, kind: CodeKind, depth: int, group: int) -> None:
    """The result of a row has the same bits alone, beside few rows, and in any batch."""
    zeros = None
    if kind in (CodeKind.INT8, CodeKind.INT4):
        zeros = {16: None, 40: torch.int8}.get(group, torch.float32)
    linear = PackedLinear(random_weight(kind, 144, depth, group, dtype, zeros=zeros))
    x = torch.randn(200, depth).to(dtype)
    whole = linear(x)
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 10), (5, 12), (20, 26), (30, 38), (40, 49), (100, 124), (3, 199)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


@pytest.mark.parametrize("rows", [1, 8])
def test_every_scale_in_e4m3_is_exact(rows: int) -> None:
    """Subnormal and negative ones too, times the scale of the row."""
    bits = torch.arange(256).where(torch.arange(256) & 127 < 127, 0).to(torch.uint8)  # 127 is NaN
    of_rows = torch.logspace(-3, 3, 64)[:, None]
    weight = QuantisedWeight(
        CodeKind.FP4, (64, 2048), torch.full((64, 1024), 0x22, dtype=torch.uint8),  # the number 1
        bits.view(torch.float8_e4m3fn).repeat(64, 1), 8, torch.bfloat16, row_scales=of_rows,
    )  # fmt: skip
    exact = bits.view(torch.float8_e4m3fn).float() * of_rows
    x, linear = torch.zeros(rows, 2048).bfloat16(), PackedLinear(weight)
    for group in range(256):
        x.zero_()[:, 8 * group] = 1.0
        assert torch.equal(linear(x), exact[:, group].bfloat16().expand(rows, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 12, 40])
def test_every_e4m3_code_is_exact(dtype: torch.dtype, rows: int) -> None:
    """Every code at every place of a word, subnormal ones too, times a row of x with a single one."""
    codes = (torch.arange(256)[:, None] + torch.arange(256)) % 256
    codes = codes.where(codes & 127 < 127, 0)  # 127 is NaN
    weight = QuantisedWeight.of_codes(CodeKind.FP8, codes, torch.tensor([[1.0, 0.5]]).repeat(256, 1), 128, dtype)
    linear, exact = PackedLinear(weight), weight.dequantise(torch.float32).T
    ones = torch.eye(256).to(dtype)
    got = torch.cat([linear(part) for part in ones.split(rows)])
    assert torch.equal(got.float(), exact)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_codes_of_fp8_give_nan(dtype: torch.dtype, scales: torch.dtype) -> None:
    """In the features that have them, and only there."""
    weight = random_weight(CodeKind.FP8, 100, 256, 128, dtype, scales=scales)
    clean = PackedLinear(weight)
    codes = weight.codes.clone()
    codes[3, 100], codes[70, 255] = 0x7F, 0xFF
    linear = PackedLinear(replace(weight, codes=codes))
    is_nan = torch.zeros(100, dtype=torch.bool)
    is_nan[[3, 70]] = True
    for rows in ROWS:
        x = torch.randn(rows, 256).to(dtype)
        y = linear(x)
        assert torch.equal(y.isnan(), is_nan.expand(rows, -1))
        assert torch.equal(y[:, ~is_nan], clean(x)[:, ~is_nan])


@pytest.mark.parametrize("kind", [CodeKind.FP8, CodeKind.FP4])
def test_the_scale_255_of_e8m0_is_nan(kind: CodeKind) -> None:
    """In the reference and in the kernels, as the Microscaling formats define it."""
    weight = random_weight(kind, 64, 128, 32, torch.bfloat16, scales=torch.uint8)
    scales = weight.scales.clone()
    scales[5, 1] = 255
    weight = replace(weight, scales=scales)
    is_nan = torch.arange(64) == 5
    assert torch.equal(weight.dequantise().isnan().any(1), is_nan)
    for rows in ROWS:
        y = PackedLinear(weight)(torch.randn(rows, 128).bfloat16())
        assert torch.equal(y.isnan(), is_nan.expand(rows, -1))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("scale", "size"), [(1e6, 1.0), (1e-12, 1.0), (1e6, 1e-9), (1e-3, 1e9)])
def test_large_and_small_fp8_weights_are_exact(rows: int, scale: float, size: float) -> None:
    """Scales above 2^8 and rows of x far below 1 meet the smallest codes of e4m3 without overflow or lost bits."""
    bits = torch.cat([torch.arange(0, 127), torch.arange(128, 255)]).repeat(64, 1).to(torch.uint8)
    weight = QuantisedWeight.of_codes(CodeKind.FP8, bits, torch.full((64, 1), scale), 254, torch.bfloat16)
    for column in (1, 3, 7, 8, 126, 128, 135):  # one code at a time; the first seven are subnormal
        x = torch.zeros(rows, 254).bfloat16()
        x[:, column] = size
        exact = F.linear(x.float(), weight.dequantise(torch.float32))
        torch.testing.assert_close(PackedLinear(weight)(x).float(), exact, rtol=1 / 128, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "zeros"), [(CodeKind.INT4, torch.int8), (CodeKind.FP8, None)])
def test_groups_of_scattered_columns_read_x_in_their_order(
    kind: CodeKind, zeros: torch.dtype | None, dtype: torch.dtype
) -> None:
    """A weight whose groups are columns in any order, as act-order makes them, gives its product."""
    weight = random_weight(kind, 70, 96, 32, dtype, zeros=zeros, is_ordered=True)
    linear = PackedLinear(weight)
    for rows in ROWS:
        x = torch.randn(rows, 96).to(dtype)
        exact = F.linear(x.float(), weight.dequantise(torch.float32))
        torch.testing.assert_close(
            linear(x).float(), exact, rtol=1 / 64, atol=3e-2 if dtype == torch.bfloat16 else 1e-4
        )


def test_a_packed_weight_takes_the_bytes_of_its_codes() -> None:
    """Packed codes, scales and zero points take as many bytes as the weight says; nothing is kept dequantised."""
    weight = random_weight(CodeKind.INT4, 128, 256, 32, torch.bfloat16, scales=torch.float16, zeros=torch.int8)
    linear = PackedLinear(weight)
    assert linear.form == "native" and weight.nbytes == 128 * 256 // 2 + 128 * 8 * 3
    assert sum(part.nbytes for part in linear.parts) == weight.nbytes
    weight = random_weight(CodeKind.INT4, 128, 256, 32, torch.bfloat16, scales=torch.float16, zeros=torch.float32)
    linear = PackedLinear(weight)
    assert sum(part.nbytes for part in linear.parts) == weight.nbytes == 128 * 256 // 2 + 128 * 8 * 6
    weight = random_weight(CodeKind.FP4, 128, 256, 16, torch.bfloat16, scales=torch.float8_e4m3fn)
    linear = PackedLinear(weight)  # as NVFP4: 4.5 bits for a weight, and a number for each row
    assert sum(part.nbytes for part in linear.parts) == weight.nbytes == 128 * 256 * 9 // 16 + 128 * 4


def test_codes_for_gpus_are_packed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed codes do not depend on how many rows are unpacked at once."""
    weight = random_weight(CodeKind.INT4, 50, 96, 32, torch.bfloat16)
    whole = quantised_linear.pack_codes(weight).codes
    monkeypatch.setattr(quantised_linear, "_UNPACKED_ROWS", 16)
    assert torch.equal(quantised_linear.pack_codes(weight).codes, whole)
    assert whole.shape == (50, 64)  # a run of 128 columns, of which 96 are the weight's


def test_groups_that_words_of_codes_cut_are_dequantised() -> None:
    """A group that is no multiple of eight columns cannot stay quantised, and still gives its product."""
    weight = random_weight(CodeKind.INT8, 64, 60, 12, torch.float32)
    assert not holds_quantised(weight, weight.device)
    x = torch.randn(3, 60)
    torch.testing.assert_close(PackedLinear(weight)(x), F.linear(x, weight.dequantise()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scales", "zeros"), [(torch.float32, torch.float32), (torch.float8_e4m3fn, torch.int8)])
@pytest.mark.parametrize("kind", CodeKind)
def test_parts_of_a_weight_are_parts_of_the_dequantised_weight(
    kind: CodeKind, scales: torch.dtype, zeros: torch.dtype | None
) -> None:
    """Rows, columns that cut groups, and weights one below the other are those of the dequantised weight."""
    zeros = zeros if kind in (CodeKind.INT8, CodeKind.INT4) else None
    weight = random_weight(kind, 40, 96, 32, torch.float32, scales=scales, zeros=zeros)
    whole = weight.dequantise()
    ranges = ((3, 10), (20, 40))
    assert torch.equal(weight.select_rows(ranges).dequantise(), torch.cat([whole[a:b] for a, b in ranges]))
    for start, stop in ((0, 48), (48, 96), (24, 72), (40, 56), (0, 96)):
        part = weight.select_columns(start, stop)
        assert part is not None and torch.equal(part.dequantise(), whole[:, start:stop])
    both = QuantisedWeight.concatenate([weight, weight.select_rows(ranges)])
    assert both is not None and torch.equal(both.dequantise()[40:], weight.select_rows(ranges).dequantise())
    wide = weight.without_row_scales()
    assert wide.scales.dtype == torch.float32 and wide.row_scales is None and torch.equal(wide.dequantise(), whole)
    other = random_weight(kind, 8, 96, 16, torch.float32, scales=scales, zeros=zeros)
    assert QuantisedWeight.concatenate([weight, other]) is None
    if zeros is not None:
        other = random_weight(kind, 8, 96, 32, torch.float32, scales=scales, zeros=torch.float16)
        assert QuantisedWeight.concatenate([weight, other]) is None
    ordered = random_weight(kind, 40, 96, 32, torch.float32, is_ordered=True)
    assert ordered.select_columns(0, 48) is None


def test_padding_is_what_whole_tiles_add() -> None:
    """Panels have 64 rows and words of 32 columns; a weight that fits them has no padding."""
    weight = random_weight(CodeKind.INT8, 70, 130, 130, torch.float32)
    rows, columns = 128, 160
    assert PackedLinear(weight).padding_bytes == rows * (columns + 4) - 70 * (130 + 4) == rows * 164 - weight.nbytes
    assert PackedLinear(random_weight(CodeKind.INT4, 64, 128, 32, torch.float32)).padding_bytes == 0
    assert PackedLinear(torch.randn(64, 32).bfloat16()).padding_bytes == 0
