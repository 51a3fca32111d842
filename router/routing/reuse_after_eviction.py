"""ReuseAfterEviction: how often a block that the last group gave up is computed again; what an eviction costs.

Of the blocks given up last it remembers the names, a quarter as many as are held. Had there been room for these, those
of them that come back would have been found, so that with n of `evicted` blocks coming back while remembered

    rate = (n / evicted) / quarter

is the share of its worth that one block more of room would have kept. It does not know groups or tiers.
"""

from collections import OrderedDict
from typing import Final

_QUARTER: Final = 0.25
_FEWEST: Final = 64  # names remembered
_MEMORY: Final = 4  # counts are halved after as many evictions as this many times the names remembered


class ReuseAfterEviction:
    """`evicted` and `stored` as events tell."""

    def __init__(self) -> None:
        # In order of eviction. An OrderedDict, because a plain dict finds its first key by a scan of all deleted slots.
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._evicted = self._regretted = 0.0

    @property
    def rate(self) -> float:
        """Chance, at most 1, that a block given up now is wanted; 0 until some have been."""
        return min(self._regretted / (self._evicted * _QUARTER), 1.0) if self._evicted >= _FEWEST else 0.0

    def evicted(self, block: bytes, held: int) -> None:
        """Nobody holds the block any more; `held` others are."""
        most = max(int(held * _QUARTER), _FEWEST)
        self._gone[block] = None
        while len(self._gone) > most:
            self._gone.popitem(last=False)
        self._evicted += 1
        if self._evicted > most * _MEMORY:
            self._evicted /= 2
            self._regretted /= 2

    def stored(self, block: bytes) -> None:
        """Somebody holds the block, who did not before."""
        if block in self._gone:
            del self._gone[block]
            self._regretted += 1
