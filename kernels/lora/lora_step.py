"""LoraStep: the rows of the current step that have an adapter. All linears of a model share one LoraStep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of one call that have an adapter, sorted by adapter.

    `rows`, `adapter_indices`: int64 [count]: a row of x, and the index of its adapter, from 0.
    """

    rows: Tensor
    adapter_indices: Tensor

    @classmethod
    def select(cls, adapters: Sequence[int]) -> LoraRows:
        """`adapters`: of each row of x, from 1; 0 for a row without an adapter."""
        order = sorted((adapter, row) for row, adapter in enumerate(adapters) if adapter)
        adapter_of, rows = torch.tensor(order, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        return cls(rows, adapter_of - 1)


class LoraStep:
    """Between steps, and in a step without adapters, it has no rows."""

    def __init__(self) -> None:
        self._by_count: dict[int, LoraRows] = {}

    @property
    def is_active(self) -> bool:
        """Whether a row of the step has an adapter."""
        return bool(self._by_count)

    @contextmanager
    def use(self, tokens: Sequence[int], sampled: Sequence[int] | None = None) -> Iterator[None]:
        """Within the context, linears add the adapters of these rows.

        `tokens`: the adapter of each token of the step, from 1; 0 for none. `sampled`: those of the tokens whose rows
        the last layer keeps; None if it keeps all rows. A linear tells the two apart by the number of its rows, so
        ValueError is raised unless `sampled` is shorter than `tokens`.
        """
        if sampled is not None and len(sampled) >= len(tokens):
            raise ValueError(f"{len(sampled)} of {len(tokens)} tokens are selected; they must be fewer")
        chosen = [adapters for adapters in (tokens, sampled) if adapters is not None]
        if any(tokens):
            self._by_count = {len(adapters): LoraRows.select(adapters) for adapters in chosen}
        try:
            yield
        finally:
            self._by_count = {}

    def rows_of(self, count: int) -> LoraRows | None:
        """The rows with adapters of a call with `count` rows; None outside steps with adapters."""
        return self._by_count[count] if self._by_count else None
