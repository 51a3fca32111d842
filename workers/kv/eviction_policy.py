"""Eviction policies: the order in which evictable blocks are evicted, by reuse rate or least recently used.

A policy is a priority queue of candidates. An `Evictor` cancels a candidate when its block is in use again; policies
skip cancelled candidates.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import Protocol

from coatcheck.workers.kv.prefix_registry import Prefix
from coatcheck.workers.kv.reuse_table import BANDS, ReuseTable


@dataclass(slots=True, eq=False)
class Candidate:
    """A block that may be evicted. `order` counts up as blocks become evictable."""

    prefix: Prefix
    order: int
    is_cancelled: bool = False

    def __lt__(self, other: "Candidate") -> bool:
        return self.order < other.order


class EvictionPolicy(Protocol):
    def push(self, candidate: Candidate) -> None: ...

    def pop(self) -> Candidate | None:
        """The next candidate that is not cancelled, or None."""


@dataclass(slots=True)
class CandidateHeap:
    """Candidates by key, then by `order`. Cancelled ones are swept when they may be half of all."""

    entries: list[tuple[float | tuple[float, ...], Candidate]] = field(default_factory=list)
    sweep_at: int = 64

    def push(self, key: float | tuple[float, ...], candidate: Candidate) -> None:
        """The keys of one heap are all numbers or all tuples."""
        heapq.heappush(self.entries, (key, candidate))
        if len(self.entries) >= self.sweep_at:
            self.entries = [entry for entry in self.entries if not entry[1].is_cancelled]
            heapq.heapify(self.entries)
            self.sweep_at = 2 * len(self.entries) + 64

    def peek(self) -> Candidate | None:
        """The first candidate that is not cancelled, or None."""
        while self.entries:
            if not self.entries[0][1].is_cancelled:
                return self.entries[0][1]
            heapq.heappop(self.entries)
        return None

    def pop(self) -> Candidate | None:
        """Remove and return what `peek` returns."""
        if (candidate := self.peek()) is not None:
            heapq.heappop(self.entries)
        return candidate


class LRUPolicy:
    """Least recently used: the block that became evictable first goes first."""

    def __init__(self) -> None:
        self._heap = CandidateHeap()

    def push(self, candidate: Candidate) -> None:
        self._heap.push(0.0, candidate)

    def pop(self) -> Candidate | None:
        return self._heap.pop()


class ReuseRatePolicy:
    """The block with the lowest reuse rate goes first.

    On Mooncake's conversation trace this finds twice the blocks that LRU finds (`bench/kv.py hits`). Weighing the rate
    with the time to compute a block, which grows with its depth, cost more hits than it saved time; all blocks of a
    prompt therefore count the same.

    Candidates of one kind and age band have one rate and share a heap, ordered by the time of the last request. The
    heaps are sorted by rate again whenever the table has new rates.
    """

    def __init__(self, table: ReuseTable) -> None:
        self._table = table
        self._heaps: dict[tuple[int, int], CandidateHeap] = {}  # by kind and age band
        self._sorted: list[tuple[int, int]] = []  # keys of `_heaps`, lowest rate first
        self._version = -1  # of the table's rates that `_sorted` follows

    def push(self, candidate: Candidate) -> None:
        if (cohort := candidate.prefix.cohort) is None:  # the registry has forgotten when it was requested
            kind, band, since = 0, BANDS - 1, -math.inf
        else:
            kind, band, since = cohort.kind, self._table.band_of(self._table.now - cohort.since), cohort.since
        heap = self._heaps.get((kind, band))
        if heap is None:
            heap = self._heaps[kind, band] = CandidateHeap()
            self._version = -1
        heap.push(since, candidate)

    def pop(self) -> Candidate | None:
        if self._version != self._table.version:
            self._move_aged_candidates()
            self._sort_heaps()
        for key in self._sorted:
            if (candidate := self._heaps[key].pop()) is not None:
                return candidate
        return None

    def _move_aged_candidates(self) -> None:
        """Move candidates to the heap of the age band that they are in now."""
        aged = []
        for (_, band), heap in self._heaps.items():
            while (candidate := heap.peek()) is not None and band < BANDS - 1:
                cohort = candidate.prefix.cohort
                if cohort is not None and self._table.band_of(self._table.now - cohort.since) == band:
                    break
                heap.pop()
                aged.append(candidate)
        for candidate in aged:
            self.push(candidate)

    def _sort_heaps(self) -> None:
        self._heaps = {key: heap for key, heap in self._heaps.items() if heap.entries}
        # Among equal rates (all are 0 until a block is requested again) the older go first.
        self._sorted = sorted(self._heaps, key=lambda key: (self._table.reuse_rate(*key), -key[1], key[0]))
        self._version = self._table.version


def create_policy(name: str, table: ReuseTable) -> EvictionPolicy:
    """The policy of the operator's setting `eviction`: "cost" (by reuse rate) or "lru"."""
    return ReuseRatePolicy(table) if name == "cost" else LRUPolicy()
