"""Level: who waits of one tenant at one priority: the first due is next, the newest gives way.

It does not know tenants, clocks or what a request is.
"""

import heapq
from collections import OrderedDict

_SPARE = 16  # of those that have left, in the heap, before it is made anew


class Level:
    """Ids, each with when it is due; those due together go in order of age."""

    __slots__ = ("_due", "_heap")

    def __init__(self) -> None:
        self._due: OrderedDict[int, float] = OrderedDict()  # by age
        self._heap: list[tuple[float, int]] = []  # and some that have left

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, id: int) -> bool:
        return id in self._due

    def add(self, id: int, due: float) -> None:
        """The newest, by its id."""
        self._due[id] = due
        heapq.heappush(self._heap, (due, id))

    def remove(self, id: int) -> None:
        """It has been taken, or waits no longer."""
        del self._due[id]
        if len(self._heap) > 2 * len(self._due) + _SPARE:
            self._heap = [(due, id) for id, due in self._due.items()]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, int]:
        """When the next of at least one is due, and its id."""
        while self._heap[0][1] not in self._due:
            heapq.heappop(self._heap)
        return self._heap[0]

    def oldest(self) -> int:
        """Of at least one."""
        return next(iter(self._due))

    def newest(self) -> int:
        """Of at least one."""
        return next(reversed(self._due))

    def due_by(self, when: float) -> int:
        """How many are due then or before."""
        return sum(due <= when for due in self._due.values())

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert list(self._due) == sorted(self._due), "it is in order of age"
        assert {(due, id) for id, due in self._due.items()} <= set(self._heap), "whoever waits comes to be next"
        assert not self._due or self.first() == min((due, id) for id, due in self._due.items()), "the first due is next"
