"""RoundRobin: what owners ask for, one thing of each in turn, so that nobody waits for all that another asks.

It does not know what is asked for, nor what becomes of it.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """An owner's own things keep their order."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # whose turn is next comes first

    def add(self, owner: str, thing: T) -> None:
        """Behind all that the owner has asked for."""
        self._lines.setdefault(owner, deque()).append(thing)

    def take(self, is_wanted: Callable[[T], bool]) -> T | None:
        """The next one; those that nobody wants any more are dropped, and take no turn."""
        for owner in list(self._lines):
            line = self._lines.pop(owner)
            while line:
                thing = line.popleft()
                if is_wanted(thing):
                    if line:
                        self._lines[owner] = line
                    return thing
        return None
