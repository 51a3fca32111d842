"""ReuseAfterEviction: how often a block that no group holds any more is computed again. Routing costs use the rate.

The hashes of the last evicted blocks are remembered, a quarter as many as there are blocks held now. With a quarter
more capacity, a remembered block that is stored again would not have been evicted. So if n of `evicted` blocks are
stored again while they are remembered,

    rate = (n / evicted) / quarter

estimates the chance that a block which is evicted now would have been used again.
"""

from collections import OrderedDict
from typing import Final

_QUARTER: Final = 0.25
_FEWEST: Final = 64  # hashes remembered
_MEMORY: Final = 4  # counts are halved after this many times as many evictions as there are remembered hashes


class ReuseAfterEviction:
    """Call `record_evicted` and `record_stored` in the order of the KV events."""

    def __init__(self) -> None:
        # In order of eviction. An OrderedDict, because a plain dict finds its first key by a scan of all deleted slots.
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        self._evicted = self._reused = 0.0

    @property
    def rate(self) -> float:
        """Chance from 0 to 1 that a block evicted now is needed again; 0 before the first evictions."""
        return min(self._reused / (self._evicted * _QUARTER), 1.0) if self._evicted >= _FEWEST else 0.0

    def record_evicted(self, block: bytes, held: int) -> None:
        """Records a block that no group holds any more. `held`: number of blocks that are still held."""
        most = max(int(held * _QUARTER), _FEWEST)
        self._remembered[block] = None
        while len(self._remembered) > most:
            self._remembered.popitem(last=False)
        self._evicted += 1
        if self._evicted > most * _MEMORY:
            self._evicted /= 2
            self._reused /= 2

    def record_stored(self, block: bytes) -> None:
        """Records a block that a group has stored and did not hold before."""
        if block in self._remembered:
            del self._remembered[block]
            self._reused += 1
