"""The ordinary line of an eviction: by what blocks are worth, or by when they were used.

An order holds leaves and gives them back one by one; leaves that have become void are dropped on the way. It does not
know tenants, retention or what hangs on what.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from coatcheck.workers.kv.prefix_registry import Prefix
from coatcheck.workers.kv.reuse_table import BANDS, ReuseTable

_COST_STEPS: Final = 2  # costs are told apart by factors of 2 ** (1 / steps)


@dataclass(slots=True, eq=False)
class Leaf:
    """A turn in line; void once the block has left it. `stamp` orders by when blocks became cold."""

    prefix: Prefix
    stamp: int
    void: bool = False

    def __lt__(self, other: "Leaf") -> bool:
        """Whether its block became cold earlier."""
        return self.stamp < other.stamp


class EvictionPolicy(Protocol):
    """Leaves in the order of their going."""

    def push(self, leaf: Leaf) -> None:
        """It stands in line."""

    def pop(self) -> Leaf | None:
        """The next that is not void, if there is one."""


@dataclass(slots=True)
class LeafHeap:
    """Leaves by a key, swept of void ones when these may be half of them."""

    entries: list[tuple[float | tuple[float, ...], Leaf]] = field(default_factory=list)
    sweep_at: int = 64

    def push(self, key: float | tuple[float, ...], leaf: Leaf) -> None:
        """Keys of one heap are all numbers, or all tuples; of equal ones the leaf that became cold first is first."""
        heapq.heappush(self.entries, (key, leaf))
        if len(self.entries) >= self.sweep_at:
            self.entries = [entry for entry in self.entries if not entry[1].void]
            heapq.heapify(self.entries)
            self.sweep_at = 2 * len(self.entries) + 64

    def first(self) -> Leaf | None:
        """The first that is not void; it stays."""
        while self.entries:
            if not self.entries[0][1].void:
                return self.entries[0][1]
            heapq.heappop(self.entries)
        return None

    def pop(self) -> Leaf | None:
        """Takes the first out."""
        if (leaf := self.first()) is not None:
            heapq.heappop(self.entries)
        return leaf


class LeastRecentlyUsed:
    """Those that became cold first go first."""

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def push(self, leaf: Leaf) -> None:
        """In the place of its stamp."""
        self._leaves.push(0.0, leaf)

    def pop(self) -> Leaf | None:
        """The first."""
        return self._leaves.pop()


class LeastWorth:
    """By the time it takes to make a block again, times its rate of being wanted; all blocks have the same bytes.

    A token's time grows with what lies before it, and doubles after `attention_crossover` blocks: without end by
    default, for depth costs more hits than it saves time (bench/LOG.md). Leaves of one kind, band of ages and class of
    cost have the same worth and make a *cell*; within it the one wanted longest ago goes first. A cell's worth changes
    as time passes, and as the table learns, so cells are ranked anew whenever it has.
    """

    def __init__(self, table: ReuseTable, attention_crossover: float = math.inf) -> None:
        self._table = table
        self._crossover = attention_crossover
        self._cells: dict[tuple[int, int, int], LeafHeap] = {}  # by kind, band and class of cost
        self._ranked: list[tuple[int, int, int]] = []
        self._version = -1

    def push(self, leaf: Leaf) -> None:
        """Into its cell."""
        prefix = leaf.prefix
        cost = int(_COST_STEPS * math.log2(1 + prefix.depth / self._crossover))
        if (cohort := prefix.cohort) is None:  # the book has forgotten when it was wanted
            kind, band, since = 0, BANDS - 1, -math.inf
        else:
            kind, band, since = cohort.kind, self._table.band(self._table.now - cohort.since), cohort.since
        cell = self._cells.get((kind, band, cost))
        if cell is None:
            cell = self._cells[kind, band, cost] = LeafHeap()
            self._version = -1
        cell.push(since, leaf)

    def pop(self) -> Leaf | None:
        """Of the cell that is worth least."""
        if self._version != self._table.version:
            self._rank()
        for key in self._ranked:
            cell = self._cells[key]
            if (leaf := cell.pop()) is not None:
                return leaf
        return None

    def _rank(self) -> None:
        """Moves leaves that have aged to where they belong now, and puts the cells in order."""
        aged = []
        for (_, band, _), cell in self._cells.items():
            while (leaf := cell.first()) is not None and band < BANDS - 1:
                cohort = leaf.prefix.cohort
                if cohort is not None and self._table.band(self._table.now - cohort.since) == band:
                    break
                cell.pop()
                aged.append(leaf)
        for leaf in aged:
            self.push(leaf)
        self._cells = {key: cell for key, cell in self._cells.items() if cell.entries}
        # Of equal worth, which is all until something has come back, the older go first.
        self._ranked = sorted(self._cells, key=lambda key: (self._worth(key), -key[1], key[0]))
        self._version = self._table.version

    def _worth(self, key: tuple[int, int, int]) -> float:
        kind, band, cost = key
        return self._table.rate(kind, band) * 2 ** (cost / _COST_STEPS)


def order_of(kind: str, table: ReuseTable) -> EvictionPolicy:
    """As an operator names it: "cost", by what the table has learned, or "lru"."""
    return LeastWorth(table) if kind == "cost" else LeastRecentlyUsed()
