"""Quantises a plain weight: each code is the nearest one.

    int8, fp8   a scale for each row: its largest magnitude over 127, or over 448 (e4m3)
    int4        a scale for 128 neighbours of a row: the number of largest magnitude becomes -8, so that all codes from
                -8 to 7 are used

No samples of activations are needed. Scales are float32 for rows, bfloat16 for groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight

GROUP = 128
_LARGEST_FP8 = 448.0


def quantise(weight: Tensor, kind: CodeKind) -> QuantisedWeight:
    """weight [rows, columns] on the CPU; `kind` is INT8, INT4 or FP8. The linear computes in the weight's dtype."""
    wide = weight.detach().float()
    if kind is CodeKind.INT4:
        return _quantise_groups(wide, weight.dtype)
    largest = _LARGEST_FP8 if kind is CodeKind.FP8 else 127.0
    scales = _nonzero(wide.abs().amax(1, keepdim=True) / largest)
    codes = wide / scales
    codes = codes.to(torch.float8_e4m3fn) if kind is CodeKind.FP8 else codes.round().to(torch.int8)
    return QuantisedWeight.of_codes(kind, codes, scales, weight.shape[1], weight.dtype)


def _quantise_groups(weight: Tensor, dtype: torch.dtype) -> QuantisedWeight:
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % GROUP)) if columns > GROUP else weight
    groups = padded.view(rows, -1, min(GROUP, columns))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = _nonzero(extreme / -8).bfloat16()
    codes = (groups / scales.float()).round().clamp(-8, 7).to(torch.int8).view(rows, -1)[:, :columns]
    return QuantisedWeight.of_codes(CodeKind.INT4, codes, scales[..., 0], GROUP, dtype)


def _nonzero(scales: Tensor) -> Tensor:
    """A row of zeros has codes of zero with any scale."""
    return scales.masked_fill(scales == 0, 1.0)
