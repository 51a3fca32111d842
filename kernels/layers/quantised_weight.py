"""QuantisedWeight: the weight of a linear as codes of 8 or 4 bits, with scales.

    weight[r, order[c]] = (codes[r, c] - zeros[r, g]) * scales[r, g],  g = c // group

Without an order, order[c] = c.

Linears hold a weight in this form and unpack it while they multiply (kernels/csrc/quantised.h, quantised_linear.py), so
that a decode step reads only the codes. The methods cut a rank's slice from a weight, and stack weights (Q, K and V).

`quantise` quantises a plain weight. It rounds to the nearest code, and needs no calibration data:

    int8, fp8   a float32 scale for each row: its largest magnitude / 127, or / 448 (e4m3)
    int4        a bfloat16 scale for each 128 consecutive columns of a row: the element of largest magnitude becomes -8,
                so that all codes from -8 to 7 are used
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # value of each e2m1
_E8M0_BIAS = 127
E8M0_NAN = 255
GROUP = 128
_LARGEST_FP8 = 448.0


class CodeKind(IntEnum):
    """What a code is, numbered as in kernels/csrc/quantised.h."""

    INT8 = 1
    INT4 = 2
    FP8 = 3  # e4m3
    FP4 = 4  # e2m1

    @property
    def bits(self) -> int:
        return 4 if self in (CodeKind.INT4, CodeKind.FP4) else 8


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight of `shape` (rows, columns). A group is `group` consecutive codes of a row, which share a scale.

    `codes`: uint8 [rows, columns]; codes of 4 bits [rows, ceil(columns / 2)], the even column in the lower half.
    Integers are two's complements. `scales`: [rows, groups] of a float dtype, or uint8: e stands for 2^(e - 127).
    `row_scales`: float32 [rows, 1], with which the scales of a row are multiplied, rounded to float32; None: all are 1.
    `zeros`: the zero points of integer codes, [rows, groups]: int8, or of a float dtype, for fractions; None: all are
    0. `order`: int [columns], the column of the weight that each column of codes belongs to; None: the same column.
    `dtype`: the dtype of the linear's x and y. `quantises_activations`: the checkpoint asks linears to quantise x too
    (w8a8_linear.py says whether they can).
    """

    kind: CodeKind
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    group: int
    dtype: torch.dtype
    zeros: Tensor | None = None
    order: Tensor | None = None
    quantises_activations: bool = False
    row_scales: Tensor | None = None

    @classmethod
    def of_codes(
        cls,
        kind: CodeKind,
        codes: Tensor,
        scales: Tensor,
        group: int,
        dtype: torch.dtype,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Self:
        """`codes`: integers [rows, columns], one code in each element. Codes of FP8 and FP4 are given as their bits.
        `zeros`: integers from -128 to 127, which become int8, or of a float dtype, which they keep."""
        rows, columns = codes.shape
        if kind.bits == 4:
            codes = pack_halves(codes)
        if zeros is not None:
            zeros = (zeros if zeros.is_floating_point() else zeros.to(torch.int8)).contiguous()
        codes = codes.contiguous().view(torch.uint8) if codes.itemsize == 1 else codes.to(torch.uint8)
        return cls(kind, (rows, columns), codes, scales.contiguous(), min(group, columns), dtype, zeros, order)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def groups(self) -> int:
        """The number of groups in each row."""
        return -(-self.shape[1] // self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and order."""
        parts = (self.codes, self.scales, self.row_scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        row_scales, zeros, order = (
            None if part is None else part.to(device) for part in (self.row_scales, self.zeros, self.order)
        )
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, row_scales=row_scales, zeros=zeros, order=order)

    def without_row_scales(self) -> Self:
        """The same weight; if it has `row_scales`, its scales are multiplied with them and become float32."""
        return self if self.row_scales is None else replace(self, scales=self._scales(), row_scales=None)

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns], computed in float32 and rounded once to `dtype`, by default that of the weight."""
        values = self._numbers()
        groups = torch.arange(self.shape[1], device=self.device) // self.group
        if self.zeros is not None:
            values = values - self.zeros.float()[:, groups]
        values = (values * self._scales()[:, groups]).to(dtype or self.dtype)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.long(), values)

    def select_rows(self, ranges: Sequence[tuple[int, int]]) -> Self:
        """The rows of these ranges [start, stop), in this order."""

        def cut(part: Tensor) -> Tensor:
            return torch.cat([part[start:stop] for start, stop in ranges])

        rows = sum(stop - start for start, stop in ranges)
        return self.with_rows(rows, cut)

    def with_rows(self, rows: int, change: Callable[[Tensor], Tensor]) -> Self:
        """`change` returns the wanted rows of a part [rows, *]. `rows`: their number."""
        row_scales, zeros = (None if part is None else change(part) for part in (self.row_scales, self.zeros))
        codes, scales = change(self.codes), change(self.scales)
        shape = (rows, self.shape[1])
        return replace(self, shape=shape, codes=codes, scales=scales, row_scales=row_scales, zeros=zeros)

    def select_columns(self, start: int, stop: int) -> Self | None:
        """Columns [start, stop). If they cut a group, groups become smaller. None if the weight has an order, or if the
        range would cut a byte of two codes."""
        columns = self.shape[1]
        if self.order is not None or (self.kind.bits == 4 and (start % 2 or (stop % 2 and stop != columns))):
            return None
        group = self.group
        if start // group == (stop - 1) // group:
            group = stop - start
        else:
            group = gcd(group, start, 0 if stop == columns else stop)
        groups = torch.arange(start, stop, group, device=self.device) // self.group
        per_byte = 8 // self.kind.bits
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            codes=self.codes[:, start // per_byte : -(-stop // per_byte)].contiguous(),
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            group=group,
        )

    @classmethod
    def concatenate(cls, weights: Sequence[Self]) -> Self | None:
        """The rows of all weights, stacked. None if the weights differ in how they are stored."""
        first = weights[0]
        layouts = {
            (w.kind, w.shape[1], w.group, w.scales.dtype, w.row_scales is None,
             None if w.zeros is None else w.zeros.dtype, w.order is None, w.quantises_activations)
            for w in weights
        }  # fmt: skip
        orders = [weight.order for weight in weights if weight.order is not None]
        if len(layouts) > 1 or any(not torch.equal(orders[0], order) for order in orders):
            return None
        row_scales = [weight.row_scales for weight in weights if weight.row_scales is not None]
        zeros = [weight.zeros for weight in weights if weight.zeros is not None]
        return replace(
            first,
            shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
            codes=torch.cat([weight.codes for weight in weights]),
            scales=torch.cat([weight.scales for weight in weights]),
            row_scales=torch.cat(row_scales) if row_scales else None,
            zeros=torch.cat(zeros) if zeros else None,
        )

    def _numbers(self) -> Tensor:
        """The codes as float32 [rows, columns]."""
        columns = self.shape[1]
        if self.kind is CodeKind.INT8:
            return self.codes.view(torch.int8).float()
        if self.kind is CodeKind.FP8:
            return self.codes.view(torch.float8_e4m3fn).float()
        halves = unpack_halves(self.codes)[:, :columns]
        if self.kind is CodeKind.INT4:
            return ((halves ^ 8) - 8).float()
        return torch.tensor(_FP4, device=self.device)[halves.long()]

    def _scales(self) -> Tensor:
        """float32 [rows, groups]"""
        if self.scales.dtype != torch.uint8:
            return self.scales.float() if self.row_scales is None else self.scales.float() * self.row_scales
        scales = torch.ldexp(torch.ones(self.scales.shape, device=self.device), self.scales.int() - _E8M0_BIAS)
        return scales.masked_fill(self.scales == E8M0_NAN, torch.nan)


def pack_halves(codes: Tensor) -> Tensor:
    """Integers [rows, columns] -> uint8 [rows, ceil(columns / 2)]: their lowest 4 bits, even columns in lower
    halves."""
    if codes.shape[1] % 2:
        codes = F.pad(codes, (0, 1))
    codes = (codes & 15).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_halves(codes: Tensor) -> Tensor:
    """uint8 [rows, bytes] -> int16 [rows, 2 * bytes], numbers from 0 to 15, the inverse of pack_halves."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int16)


def quantise(weight: Tensor, kind: CodeKind) -> QuantisedWeight:
    """`weight`: [rows, columns], on the CPU. `kind`: INT8, INT4 or FP8. The result's `dtype` is the weight's."""
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
    """`scales` with 1 for 0, to divide by. The codes of a row of zeros are 0 with any scale."""
    return scales.masked_fill(scales == 0, 1.0)
