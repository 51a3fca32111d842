"""QuantisedExperts: one weight of each expert of a layer, as codes with scales. All are stored in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels.layers.quantised_weight import QuantisedWeight


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedExperts:
    """`count` weights [rows, columns]. `stacked`: their rows, expert after expert, [count * rows, columns]; its `order`
    is None."""

    count: int
    stacked: QuantisedWeight

    @classmethod
    def of(cls, weights: Sequence[QuantisedWeight], count: int) -> Self | None:
        """`weights`: one or several for each expert, expert after expert. None if they differ in how they are stored,
        or if their columns are reordered (act-order)."""
        stacked = QuantisedWeight.concatenate(weights)
        return None if stacked is None or stacked.order is not None else cls(count, stacked)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, rows, columns)"""
        rows, columns = self.stacked.shape
        return self.count, rows // self.count, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.stacked.dtype

    @property
    def device(self) -> torch.device:
        return self.stacked.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.stacked.nbytes

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        return replace(self, stacked=self.stacked.to(device))

    def dequantise(self) -> Tensor:
        """[experts, rows, columns]. One expert at a time, because the float32 products take much memory."""
        plain = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for expert in range(self.count):
            plain[expert] = self.select_experts(expert, expert + 1).stacked.dequantise()
        return plain

    def select_experts(self, start: int, stop: int) -> Self:
        """Experts [start, stop)."""
        rows = self.shape[1]
        return replace(self, count=stop - start, stacked=self.stacked.select_rows([(start * rows, stop * rows)]))

    def select_rows(self, rows: Tensor) -> Self:
        """These rows of each expert, in this order. `rows`: indices, int64."""

        def pick(part: Tensor) -> Tensor:
            return part.view(self.count, -1, part.shape[1])[:, rows].flatten(0, 1)

        return self._with_rows(len(rows), pick)

    def select_columns(self, start: int, stop: int) -> Self | None:
        """Columns [start, stop) of each expert. None in the cases of QuantisedWeight.select_columns."""
        stacked = self.stacked.select_columns(start, stop)
        return None if stacked is None else replace(self, stacked=stacked)

    def pad_rows(self, multiple: int) -> Self:
        """With rows of zeros added to each expert, so that its number of rows is a multiple of `multiple`."""
        rows = self.shape[1]
        more = -rows % multiple

        def pad(part: Tensor) -> Tensor:
            return F.pad(part.view(self.count, rows, -1), (0, 0, 0, more)).flatten(0, 1)

        return self if more == 0 else self._with_rows(rows + more, pad)

    def _with_rows(self, rows: int, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, stacked=self.stacked.with_rows(self.count * rows, change))
