"""Linears over quantised weights and activations, and in a fixed order; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels.gpu_properties import gpu_properties
from coatcheck.kernels.layers import invariant_linear
from coatcheck.kernels.layers.heads_linear import HeadsLinear, heads_linear_reference
from coatcheck.kernels.layers.linear import PackedLinear, holds_quantised, multiply_dequantised
from coatcheck.kernels.layers.quantised_linear import WARM_UP_ROWS, dequantise_rows, pack_codes
from coatcheck.kernels.layers.quantised_rows import (
    QuantisedRows,
    RowFormat,
    quantise_rows,
    quantise_rows_reference,
)
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul, silu_mul_and_quantise
from tests.kernels.layers.quantised_weights import random_weight
from tests.kernels.triton.agreement import SENTINEL, agree

# Kind, dtypes of the scales and of the zero points, columns in any order, and (features, depth, group).
WEIGHTS = (
    (CodeKind.INT8, torch.float32, None, False, (100, 130, 130)),
    (CodeKind.INT8, torch.bfloat16, torch.int8, False, (17, 80, 16)),
    (CodeKind.INT4, torch.float16, torch.int8, True, (70, 200, 32)),
    (CodeKind.INT4, torch.float32, None, False, (40, 256, 128)),
    (CodeKind.FP8, torch.float32, None, False, (40, 200, 128)),
    (CodeKind.FP8, torch.uint8, None, False, (40, 96, 32)),
    (CodeKind.FP4, torch.uint8, None, False, (33, 96, 32)),
    (CodeKind.FP4, torch.float32, None, False, (33, 80, 16)),
    (CodeKind.INT4, torch.bfloat16, torch.int8, False, (33, 1280, 128)),  # and these have units
    (CodeKind.INT8, torch.float32, torch.int8, False, (33, 1280, 1280)),
    (CodeKind.FP4, torch.uint8, None, False, (33, 1100, 32)),
    # Zero points that may be fractions: a group in a step, several, more than one step in a group, one for the row.
    (CodeKind.INT4, torch.float32, torch.float32, False, (33, 1280, 32)),
    (CodeKind.INT4, torch.float16, torch.float16, True, (33, 160, 16)),
    (CodeKind.INT8, torch.float32, torch.float32, False, (40, 192, 64)),
    (CodeKind.INT4, torch.bfloat16, torch.float32, False, (33, 1280, 128)),
    (CodeKind.INT8, torch.float32, torch.float32, False, (33, 1280, 1280)),
)


def quantised_linears(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Every kind of codes, with numbers of features and columns that no tile divides, in tiles of each height, and by
    the library in slices of the features."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for kind, scales, zeros, is_ordered, (features, depth, group) in WEIGHTS:
            weight = random_weight(
                kind, features, depth, group, dtype, scales=scales, zeros=zeros, is_ordered=is_ordered
            )
            bias = torch.randn(features).to(dtype)
            linear = PackedLinear(weight, bias)
            assert linear.form == "triton" and linear.codes is not None
            for rows in WARM_UP_ROWS if kind is CodeKind.INT4 else WARM_UP_ROWS[1:2]:
                x = (torch.randn(rows, depth) / (16 if depth > 1000 else 1)).to(dtype)
                check_product(linear(x), x, weight, bias)
        alone(dtype)
        dequantised(dtype)


def check_product(y: Tensor, x: Tensor, weight: QuantisedWeight, bias: Tensor) -> None:
    """Scales multiply sums, or weights that are then rounded to the dtype of x: y is either product."""
    products = [F.linear(x.float(), weight.dequantise(to).float(), bias.float()) for to in (torch.float32, y.dtype)]
    nearest = min(products, key=lambda product: float((y - product).abs().mean()))
    torch.testing.assert_close(y.float(), nearest, rtol=_ROUNDING[y.dtype], atol=_ROUNDING[y.dtype])


def dequantised(dtype: torch.dtype) -> None:
    """The kernel that dequantises gives the bits of `dequantise`, and any slices of the features the same product."""
    for kind, scales, zeros, is_ordered, (features, depth, group) in WEIGHTS:
        weight = random_weight(kind, features, depth, group, dtype, scales=scales, zeros=zeros, is_ordered=is_ordered)
        codes = pack_codes(weight)
        plain = weight.dequantise()
        if weight.order is not None:
            plain = plain[:, weight.order]
        for first, last in ((0, features), (7, features - 1)):
            out = torch.full((last - first, depth), SENTINEL, dtype=dtype)
            assert torch.equal(dequantise_rows(codes, first, out), plain[first:last])
    weight = random_weight(CodeKind.INT4, 300, 64, 32, dtype)
    x, bias = torch.randn(WARM_UP_ROWS[-1], 64).to(dtype), torch.randn(300).to(dtype)
    for has_bias in (False, True):
        whole = multiply_dequantised(pack_codes(weight), x, bias if has_bias else None)
        sliced = multiply_dequantised(
            pack_codes(weight), x, bias if has_bias else None, max_bytes=128 * 64 * dtype.itemsize
        )
        agree(sliced, whole)


_ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def alone(dtype: torch.dtype) -> None:
    """With `batch_invariant` a row has the same bits alone and among others, also if separate programs compute units of
    its columns beside few rows, and one program all of them beside many. Small groups are dequantised."""
    for kind, depth, group, zeros in (
        (CodeKind.INT4, 96, 32, None), (CodeKind.INT4, 1200, 32, None), (CodeKind.INT8, 1200, 1200, None),
        (CodeKind.INT4, 1280, 16, torch.float32),
    ):  # fmt: skip
        linear = PackedLinear(random_weight(kind, 40, depth, group, dtype, zeros=zeros), batch_invariant=True)
        x = torch.randn(WARM_UP_ROWS[-1], depth).to(dtype)
        whole = linear(x)
        for part in (slice(3, 4), slice(50, 70)):
            assert torch.equal(linear(x[part]), whole[part])
        assert linear(x[:0]).shape == (0, 40)
    small = random_weight(CodeKind.INT8, 24, 48, 24, dtype)
    assert not holds_quantised(small, small.device) and PackedLinear(small).form != "triton"
    agree(PackedLinear(small)(x[:, :48].float().to(dtype)), F.linear(x[:, :48], small.dequantise()))


def large() -> None:
    """Linears of 4,096 features and columns with up to 2,048 rows, for GPUs alone: too slow in the interpreter. The
    products agree with the dequantised weight's, and in the deterministic mode each row has the same bits alone."""
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        for kind, group in ((CodeKind.INT8, 4096), (CodeKind.FP8, 4096), (CodeKind.INT4, 128), (CodeKind.FP4, 32)):
            scales = torch.uint8 if kind is CodeKind.FP4 else torch.float32
            weight = random_weight(kind, 4096, 4096, group, dtype, scales=scales)
            bias, x = torch.randn(4096).to(dtype), (torch.randn(2048, 4096) / 64).to(dtype)
            linear, fixed = PackedLinear(weight, bias), PackedLinear(weight, bias, batch_invariant=True)
            every = fixed(x)
            for rows in (1, 16, 64, 256, 257, 2048):
                check_product(linear(x[:rows]), x[:rows], weight, bias)
                check_product(fixed(x[:rows]), x[:rows], weight, bias)
                assert torch.equal(fixed(x[:rows]), every[:rows]), (kind, dtype, rows)


def fixed_order(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """A row has the same bits among any rows: its units computed side by side or by one program, at any place in the
    batch, in tiles of few rows and of many. Features and columns may divide by no tile."""
    torch.manual_seed(0)
    for dtype in dtypes:
        gpu = gpu_properties(torch.get_default_device())
        launch = invariant_linear.pick_launch(dtype.itemsize, gpu)
        for heads, features, depth, has_bias in ((1, 70, 1030, True), (1, 64, 1024, False), (3, 17, 40, False)):
            weight = torch.randn(heads, features, depth).to(dtype)
            bias = torch.randn(features).to(dtype) if has_bias else None
            units, columns = invariant_linear.units_of(heads, features, depth, launch, gpu)
            assert columns % launch.block_k == 0 and (units == 2) == (depth > 1000)
            many = invariant_linear._SPLIT_ROWS + 1
            assert invariant_linear.warm_up_rows(weight[0]) == ((1, many) if units > 1 else (1,))
            assert not invariant_linear.is_split(many, heads, features, units, launch, gpu)
            x = torch.randn(many, heads, depth).to(dtype)
            whole = _heads_linear(weight, x, bias)
            exact = heads_linear_reference(weight, x) + (0 if bias is None else bias.float())
            torch.testing.assert_close(whole.float(), exact, rtol=_ROUNDING[dtype], atol=20 * _ROUNDING[dtype])
            for first, last in ((0, 1), (7, 8), (3, 70), (63, 193)):
                assert torch.equal(_heads_linear(weight, x[first:last], bias), whole[first:last])
            order = torch.randperm(many)[:100]
            assert torch.equal(_heads_linear(weight, x[order], bias), whole[order])


def _heads_linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, heads, depth] -> [rows, heads, features], for several heads over strided rows."""
    if len(weight) == 1:
        return invariant_linear.invariant_linear(weight[0], x[:, 0].contiguous(), bias)[:, None]
    out = x.new_full((len(x), len(weight), weight.shape[1] + 3), SENTINEL)
    columns_first = weight.transpose(1, 2).contiguous().transpose(1, 2)
    invariant_linear.invariant_heads_linear(columns_first, x, out[:, :, :-3])
    assert bool((out[:, :, -3:] == SENTINEL).all())
    return out[:, :, :-3]


def packed_in_fixed_order() -> None:
    """With `batch_invariant` the modules take these kernels where a GPU has the plain weight."""
    linear = PackedLinear(torch.randn(70, 90).half(), torch.randn(70).half(), batch_invariant=True)
    x = torch.randn(2, 5, 90).half()
    agree(linear(x), F.linear(x, linear.parts[0], linear.bias))
    assert torch.equal(linear(x[1:, 2:3]), linear(x)[1:, 2:3]) and linear(x[:0]).shape == (0, 5, 70)
    assert linear.variant == ((70, 90), False, None)
    linear.compile_kernels()
    heads = HeadsLinear(torch.randn(3, 40, 50).half(), batch_invariant=True)
    x = torch.randn(9, 3, 50).half()
    torch.testing.assert_close(heads(x).float(), heads_linear_reference(heads._weight, x), rtol=2e-3, atol=4e-2)
    assert torch.equal(heads(x[4:5]), heads(x)[4:5])


# Kind and (features, depth, group).
W8A8_WEIGHTS = (
    (CodeKind.FP8, (70, 200, 200)),
    (CodeKind.FP8, (40, 320, 128)),
    (CodeKind.INT8, (70, 144, 144)),
    (CodeKind.INT8, (33, 160, 32)),
)


def quantised_activations(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """W8A8 linears are those of the float32 product of dequantised activations and weights, in tiles of each height.
    A row has the same bits alone and among others with `batch_invariant`."""
    torch.manual_seed(0)
    for dtype in dtypes:
        row_codes(dtype)
        broken_rows(dtype)
        for kind, (features, depth, group) in W8A8_WEIGHTS:
            weight = replace(random_weight(kind, features, depth, group, dtype), quantises_activations=True)
            if group < depth:  # scales of groups keep the type that the checkpoint has
                weight = replace(weight, scales=weight.scales.to(dtype))
            format = RowFormat(kind, 0 if group == depth else group)
            bias = torch.randn(features).to(dtype)
            linear = PackedLinear(weight, bias)
            assert linear.form == "triton" and linear.row_format == format
            for rows in WARM_UP_ROWS if kind is CodeKind.FP8 else WARM_UP_ROWS[1:2]:
                x = torch.randn(rows, depth).to(dtype)
                quantised = quantise_rows_reference(x, format)
                exact = F.linear(quantised.dequantise(), weight.dequantise(torch.float32), bias.float())
                y = linear(x)
                assert torch.equal(y, linear(quantised))
                error = (y.float() - exact).abs().max() / exact.abs().max()
                assert error <= _ROUNDING[dtype] / 2, (kind, dtype, float(error))
            if kind is CodeKind.FP8:
                fixed = PackedLinear(weight, bias, batch_invariant=True)
                x = torch.randn(70, depth).to(dtype)
                assert torch.equal(fixed(x[50:51]), fixed(x)[50:51])


def row_codes(dtype: torch.dtype) -> None:
    """Kernels quantise as the reference does, bit for bit, with groups and without, rows of zeros and tiny rows too.
    Norm and activation write the codes that a kernel behind them would write."""
    for kind in (CodeKind.FP8, CodeKind.INT8):
        for width, group in ((200, 0), (5000, 0), (200, 128), (5000, 128), (96, 32)):
            format = RowFormat(kind, group)
            x = torch.randn(5, width).to(dtype)
            x[1], x[2], x[3] = 0, x[2] * 1e-4, x[3] * 1e3
            same_codes(quantise_rows(x, format), quantise_rows_reference(x, format))
            wide = torch.randn(5, 2 * width).to(dtype)[:, : 2 * (width // 2)]
            for name in ("silu", "gelu_tanh"):
                same_codes(silu_mul_and_quantise(wide, name, format), quantise_rows(silu_mul(wide, name), format))
            norm, residual = RmsNorm(torch.rand(width).to(dtype), 1e-5), torch.randn(5, width).to(dtype)
            normed, total = norm.add_norm_and_quantise(x, residual, format)
            plain, plain_total = norm.add_and_norm(x, residual)
            assert torch.equal(total, plain_total)
            same_codes(normed, quantise_rows(plain, format))
            both, both_total = norm.add_norm_and_quantise(x, residual, format, keeps_plain=True)
            same_codes(both, normed)
            assert both.plain is not None and torch.equal(both.plain, plain) and torch.equal(both_total, total)
            same_codes(norm.add_norm_and_quantise(x, None, format)[0], quantise_rows(norm(x), format))


def broken_rows(dtype: torch.dtype) -> None:
    """A NaN or an infinity at any place makes its whole row of y NaN, as it would in a linear of plain x, where all
    weights but 0 spread it; other rows keep their bits. Norm and activation write the same scales."""
    for kind, group in ((CodeKind.FP8, 0), (CodeKind.INT8, 0), (CodeKind.FP8, 128), (CodeKind.INT8, 32)):
        weight = random_weight(kind, 40, 4992, group or 4992, dtype)
        linear, format = PackedLinear(replace(weight, quantises_activations=True)), RowFormat(kind, group)
        assert linear.row_format == format
        x = torch.randn(5, 4992).to(dtype)
        healthy = linear(x)
        for row, column, value in ((0, 3, torch.nan), (1, 4991, -torch.nan), (2, 4200, torch.inf), (4, 0, -torch.inf)):
            x[row, column] = value
        codes, reference = quantise_rows(x, format), quantise_rows_reference(x, format)
        assert torch.equal(codes.scales.isnan(), reference.scales.isnan())
        for rows in (x, codes):
            y = linear(rows)
            assert y[[0, 1, 2, 4]].isnan().all() and torch.equal(y[3], healthy[3])
        wide = torch.cat((torch.ones_like(x), x), dim=1)
        gated = silu_mul_and_quantise(wide, "silu", format)
        assert torch.equal(gated.scales.isnan(), reference.scales.isnan())
        norm = RmsNorm(torch.ones(4992, dtype=dtype), 1e-5)
        normed = norm.add_norm_and_quantise(x, torch.zeros_like(x), format)[0]
        assert torch.equal(normed.scales.isnan(), quantise_rows_reference(norm(x), format).scales.isnan())
        assert normed.scales.isnan().any(0).tolist() == [True, True, True, False, True]


def same_codes(ours: QuantisedRows, theirs: QuantisedRows) -> None:
    assert ours.format == theirs.format and ours.dtype == theirs.dtype
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
