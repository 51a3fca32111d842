"""Eviction: which of a tier's cold blocks goes next.

Each tier owns one: it inserts a block's record when nobody holds the block any more, removes it when somebody does
again, and pops the next to go when it needs room. It does not know where blocks lie nor how many a tier has.
"""

from collections import OrderedDict
from typing import Protocol

from .prefix_book import Prefix


class Eviction(Protocol):
    """The cold blocks of one tier, in the order of their going."""

    def insert(self, prefix: Prefix) -> None:
        """It may go from now on; a sequence's blocks are given deepest first."""

    def remove(self, prefix: Prefix) -> None:
        """It may not go any more: it is held again, or gone."""

    def pop(self) -> Prefix:
        """Takes out the one to go next; there is at least one."""

    def __len__(self) -> int: ...

    def __contains__(self, prefix: Prefix) -> bool: ...


class LeastRecentlyUsed:
    """In the order of insertion."""

    def __init__(self) -> None:
        self._cold: OrderedDict[Prefix, None] = OrderedDict()

    def insert(self, prefix: Prefix) -> None:
        """To the end."""
        self._cold[prefix] = None

    def remove(self, prefix: Prefix) -> None:
        """Wherever it is."""
        del self._cold[prefix]

    def pop(self) -> Prefix:
        """The first."""
        return self._cold.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._cold)

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._cold
