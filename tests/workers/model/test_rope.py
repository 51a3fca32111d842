"""The table of cos and sin by position."""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.workers.model import rope


def cos_and_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * torch.logspace(0, -4, 8)
    return angles.cos(), angles.sin()


def test_rows_of_the_table_are_those_that_would_be_computed() -> None:
    """In any order, before and after the table has grown, and beyond the positions that it holds."""
    computed: list[int] = []

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        computed.append(len(positions))
        return cos_and_sin(positions)

    table = rope.CosSinTable(compute)
    last = rope._TABLE_POSITIONS
    for positions in ([0], [5, 3, 3], [2047], [2048], [7000, 1], [last - 1], [last], [last + 9, 2]):
        at = torch.tensor(positions)
        for ours, theirs in zip(table.rows(at, max(positions) + 1), cos_and_sin(at), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert computed == [2048, 4096, 8192, last, 1, 2]
