"""Linears over quantised weights in Triton's interpreter; run by interpreted.py."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from coatcheck.kernels.layers.linear import PackedLinear, holds_quantised
from coatcheck.kernels.layers.quantised_linear import WARM_UP_ROWS
from coatcheck.kernels.layers.quantised_weight import CodeKind
from tests.kernels.layers.quantised_weights import random_weight
from tests.kernels.triton.agreement import agree

# Kind, dtype of the scales, zero points, columns in any order, and (features, depth, group).
WEIGHTS = (
    (CodeKind.INT8, torch.float32, False, False, (100, 130, 130)),
    (CodeKind.INT8, torch.bfloat16, True, False, (17, 80, 16)),
    (CodeKind.INT4, torch.float16, True, True, (70, 200, 32)),
    (CodeKind.INT4, torch.float32, False, False, (40, 256, 128)),
    (CodeKind.FP8, torch.float32, False, False, (40, 200, 128)),
    (CodeKind.FP4, torch.uint8, False, False, (33, 96, 32)),
)


def quantised_linears(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Every kind of codes, with numbers of features and columns that no tile divides, in tiles of each height."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for kind, scales, has_zeros, is_ordered, (features, depth, group) in WEIGHTS:
            weight = random_weight(
                kind, features, depth, group, dtype, scales=scales, has_zeros=has_zeros, is_ordered=is_ordered
            )
            bias = torch.randn(features).to(dtype)
            linear = PackedLinear(weight, bias)
            assert linear.form == "triton" and linear.codes is not None
            for rows in WARM_UP_ROWS if kind is CodeKind.INT4 else WARM_UP_ROWS[1:2]:
                x = torch.randn(rows, depth).to(dtype)
                exact = F.linear(x.float(), weight.dequantise().float(), bias.float())
                torch.testing.assert_close(linear(x).float(), exact, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype])
        alone(dtype)


_ROUNDING = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def alone(dtype: torch.dtype) -> None:
    """With `batch_invariant` a row has the same bits alone and among others. Small groups are dequantised."""
    linear = PackedLinear(random_weight(CodeKind.INT4, 40, 96, 32, dtype), batch_invariant=True)
    x = torch.randn(70, 96).to(dtype)
    whole = linear(x)
    for part in (slice(3, 4), slice(50, 70)):
        assert torch.equal(linear(x[part]), whole[part])
    assert linear(x[:0]).shape == (0, 40)
    small = random_weight(CodeKind.INT8, 24, 48, 24, dtype)
    assert not holds_quantised(small, small.device) and PackedLinear(small).form != "triton"
    agree(PackedLinear(small)(x[:, :48].float().to(dtype)), F.linear(x[:, :48], small.dequantise()))
