"""Eviction policies: the order in which evictable blocks are evicted, by expected saving or least recently used.

A policy is a priority queue of candidates. An `Evictor` clears `is_queued` of a candidate whose block is in use again;
policies skip the candidate.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Final, Protocol

from coatcheck.workers.kv.prefix_registry import PrefixBlock
from coatcheck.workers.kv.reuse_table import BANDS, ReuseTable

_CLASSES_PER_DOUBLING: Final = 2  # of the time to compute a block


@dataclass(slots=True, eq=False)
class EvictionCandidate:
    """An evictable block.

    `order` counts up as blocks become evictable. `is_queued`: False if the block has evictable children, is in use,
    or has a newer candidate; a queue that still holds the candidate skips it.
    """

    prefix: PrefixBlock
    order: int
    is_queued: bool = False

    def __lt__(self, other: "EvictionCandidate") -> bool:
        return self.order < other.order


class EvictionPolicy(Protocol):
    def push(self, candidate: EvictionCandidate) -> None: ...

    def pop(self) -> EvictionCandidate | None:
        """The next candidate whose `is_queued` is set, or None."""


class CandidateHeap:
    """Candidates ordered by key, then by `order`. With equal keys the heap is an LRU policy.

    The keys of one heap are all numbers or all tuples. Candidates that are no longer queued are removed whenever the
    heap has doubled.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float | tuple[int, float], EvictionCandidate]] = []
        self._sweep_at = 64

    def __len__(self) -> int:
        """Candidates, including those no longer queued."""
        return len(self._entries)

    def push(self, candidate: EvictionCandidate, key: float | tuple[int, float] = 0.0) -> None:
        heapq.heappush(self._entries, (key, candidate))
        if len(self._entries) >= self._sweep_at:
            self._entries = [entry for entry in self._entries if entry[1].is_queued]
            heapq.heapify(self._entries)
            self._sweep_at = 2 * len(self._entries) + 64

    def peek(self) -> EvictionCandidate | None:
        """The first candidate whose `is_queued` is set, or None."""
        while self._entries and not self._entries[0][1].is_queued:
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop(self) -> EvictionCandidate | None:
        """Remove and return what `peek` returns."""
        if (candidate := self.peek()) is not None:
            heapq.heappop(self._entries)
        return candidate


class ExpectedSavingPolicy:
    """Evicts the block first that is expected to save the least computing time.

    A block's expected saving is its reuse rate times the time to compute it again. That time doubles at a depth of
    `crossover` blocks, where attention costs as much as all else. On Mooncake's conversation trace the reuse rate alone
    has twice the hits of LRU (`bench/kv.py hits`). Counting the computing time too lowers the mean TTFT on the
    synthetic trace by up to 66% more, and changes it by at most 3% on the conversation trace (`bench/kv.py ttft`).

    Candidates of one kind, age band and cost class have the same expected saving and share a heap, ordered by the time
    of the last request. The heaps are sorted again whenever the table has new rates. `table`: the reuse rates.
    """

    def __init__(self, table: ReuseTable, crossover: float) -> None:
        self._table = table
        self._crossover = crossover
        self._heaps: dict[tuple[int, int, int], CandidateHeap] = {}  # by kind, age band and cost class
        self._sorted: list[tuple[int, int, int]] = []  # keys of `_heaps`, lowest saving first
        self._version = -1  # the `table.version` whose rates sorted `_sorted`; -1 to sort at the next `pop`

    def push(self, candidate: EvictionCandidate) -> None:
        if (cohort := candidate.prefix.cohort) is None:  # the registry has dropped the time of the last request
            kind, band, since = 0, BANDS - 1, -math.inf
        else:
            kind, band, since = cohort.kind, self._table.band_of(self._table.now - cohort.since), cohort.since
        cost_class = int(_CLASSES_PER_DOUBLING * math.log2(1 + candidate.prefix.depth / self._crossover))
        heap = self._heaps.get((kind, band, cost_class))
        if heap is None:
            heap = self._heaps[kind, band, cost_class] = CandidateHeap()
            self._version = -1
        heap.push(candidate, since)

    def pop(self) -> EvictionCandidate | None:
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
        for (_, band, _), heap in self._heaps.items():
            while (candidate := heap.peek()) is not None and band < BANDS - 1:
                cohort = candidate.prefix.cohort
                if cohort is not None and self._table.band_of(self._table.now - cohort.since) == band:
                    break
                heap.pop()
                aged.append(candidate)
        for candidate in aged:
            self.push(candidate)

    def _sort_heaps(self) -> None:
        self._heaps = {key: heap for key, heap in self._heaps.items() if len(heap)}
        # Among equal savings (all are 0 until a block is requested again) the older go first.
        self._sorted = sorted(self._heaps, key=lambda key: (self._expected_saving(key), -key[1], key[0]))
        self._version = self._table.version

    def _expected_saving(self, key: tuple[int, int, int]) -> float:
        """Per second of keeping a block, in units of the time to compute a prompt's first block."""
        kind, band, cost_class = key
        return self._table.reuse_rate(kind, band) * 2 ** (cost_class / _CLASSES_PER_DOUBLING)


def create_policy(name: str, table: ReuseTable, crossover: float = math.inf) -> EvictionPolicy:
    """The policy of the operator's setting `eviction`: "cost" (expected saving) or "lru".

    `crossover`: the depth in blocks at which a block takes twice as long to compute as the first block of a prompt.
    Infinite: every block takes as long as the first.
    """
    return ExpectedSavingPolicy(table, crossover) if name == "cost" else CandidateHeap()
