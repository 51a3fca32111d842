"""Random quantised weights of every kind."""

from __future__ import annotations

from dataclasses import replace

import torch

from coatcheck.kernels import native
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight


def random_weight(
    kind: CodeKind,
    rows: int,
    columns: int,
    group: int,
    dtype: torch.dtype,
    *,
    scales: torch.dtype = torch.float32,
    zeros: torch.dtype | None = None,
    is_ordered: bool = False,
) -> QuantisedWeight:
    """Codes over their whole range. `zeros`: int8, or a float dtype for fractions; None: no zero points. `is_ordered`:
    columns belong to groups in a random order. With scales in e4m3 the weight has `row_scales`."""
    groups = -(-columns // group)
    match kind:
        case CodeKind.INT8:
            codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
        case CodeKind.FP8:
            bits = torch.randint(0, 256, (rows, columns))
            codes = bits.where((bits & 127) < 127, 0).to(torch.uint8)  # 127 is NaN
        case _:
            codes = torch.randint(0, 16, (rows, columns))
    if scales == torch.uint8:
        factors = torch.randint(118, 126, (rows, groups), dtype=torch.uint8)
    else:
        size = 100.0 if scales == torch.float8_e4m3fn else 0.1
        factors = (torch.rand(rows, groups) * size + size / 10).to(scales)
    points = None
    if zeros is not None:
        points = torch.rand(rows, groups) * 18 - 9 if zeros.is_floating_point else torch.randint(-9, 9, (rows, groups))
        points = points.to(zeros)
    order = torch.randperm(columns).to(torch.int32) if is_ordered else None
    weight = QuantisedWeight.of_codes(kind, codes, factors, group, dtype, points, order)
    if scales == torch.float8_e4m3fn:
        return replace(weight, row_scales=torch.rand(rows, 1) * 1e-3 + 1e-4)
    return weight


def multiplies_rounded_weights() -> bool:
    """Whether this processor's class multiplies dequantised weights in bfloat16."""
    library = native.library()
    return library is not None and library.cpu_class in ("amx", "neon_bf16")
