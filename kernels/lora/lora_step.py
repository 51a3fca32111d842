"""LoraStep: the rows of the current step that have an adapter. All linears of a model share one LoraStep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels.lora.lora_tiles import LoraTiles


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of one call of a linear that have an adapter, sorted by adapter.

    `rows`: int64 [count], row numbers of x. `adapter_indices`: int64 [count], the index of each row's adapter, from 0.
    """

    rows: Tensor
    adapter_indices: Tensor

    @classmethod
    def select(cls, adapters: Sequence[int]) -> LoraRows:
        """`adapters`: the number of each row's adapter, counted from 1; 0 for a row without an adapter."""
        order = sorted((adapter, row) for row, adapter in enumerate(adapters) if adapter)
        adapter_of, rows = torch.tensor(order, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        return cls(rows, adapter_of - 1)


class LoraStep:
    """The adapters of the current step's rows. Between steps, and in a step without adapters, it has no rows.

    `num_stacked`: how many adapters the model's linears hold stacked on a GPU (StackedLora). Such linears read the
    rows as LoraTiles, others as LoraRows.
    """

    def __init__(self) -> None:
        self.num_stacked = 0
        self._by_count: dict[int, LoraRows] = {}
        self._tiles: dict[int, LoraTiles] = {}

    @property
    def is_active(self) -> bool:
        """Whether a row of the step has an adapter. In a CUDA graph, whether a row may have one."""
        return bool(self._by_count or self._tiles)

    @contextmanager
    def use(self, tokens: Sequence[int], sampled: Sequence[int] | None = None) -> Iterator[None]:
        """Within the context, linears add the adapters of these rows.

        `tokens`: the number of each token's adapter, counted from 1; 0 for none. `sampled`: the same for the tokens
        whose rows the last layer keeps; None if it keeps all rows. A linear sees which of the two it has by the number
        of its rows, so `sampled` must be shorter than `tokens`. Raises ValueError if it is not.
        """
        if sampled is not None and len(sampled) >= len(tokens):
            raise ValueError(f"{len(sampled)} of {len(tokens)} tokens are selected; they must be fewer")
        given = [adapters for adapters in (tokens, sampled) if adapters is not None]
        if any(tokens):
            self._by_count = {len(adapters): LoraRows.select(adapters) for adapters in given}
        try:
            yield
        finally:
            self._by_count = {}

    @contextmanager
    def use_tiles(self, *tiles: LoraTiles) -> Iterator[None]:
        """As `use`, for stacked adapters. `tiles`: those of all tokens, and those of the tokens whose rows the last
        layer keeps, if it does not keep all."""
        self._tiles = {len(one.order): one for one in tiles}
        try:
            yield
        finally:
            self._tiles = {}

    def rows_of(self, count: int) -> LoraRows | None:
        """The rows with adapters in a call of a linear with `count` rows. None if no row of the step has an adapter."""
        return self._by_count[count] if self._by_count else None

    def tiles_of(self, count: int) -> LoraTiles:
        """The tiles in a call of a linear with `count` rows. Only while `use_tiles` is open."""
        return self._tiles[count]
