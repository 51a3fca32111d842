"""Level: the waiting requests of one tenant at one priority, by due time; when a queue is full the newest gives way.

`needs` is the class of a request: requests of one class can go to the same groups. Classes for which no group has room
are `blocked`; the first due of the others is found without looking at the requests of a blocked class.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

_SPARE = 16  # removed ids that a heap may hold beyond its own size before it is rebuilt


class _Place(NamedTuple):
    due: float
    needs: Hashable


class Level:
    """Ids, each with when it is due and its class; those due together go in order of age."""

    __slots__ = ("_heaps", "_places", "_sizes")

    def __init__(self) -> None:
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by age
        self._heaps: dict[Hashable, list[tuple[float, int]]] = {}  # by class: (due, id), some of removed ids
        self._sizes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, id: int) -> bool:
        return id in self._places

    @property
    def classes(self) -> AbstractSet[Hashable]:
        """The classes of the waiting requests."""
        return self._heaps.keys()

    def add(self, id: int, due: float, needs: Hashable) -> None:
        """The newest, by its id."""
        self._places[id] = _Place(due, needs)
        heapq.heappush(self._heaps.setdefault(needs, []), (due, id))
        self._sizes[needs] = self._sizes.get(needs, 0) + 1

    def remove(self, id: int) -> None:
        """It has been taken, or waits no longer."""
        needs = self._places.pop(id).needs
        self._sizes[needs] = size = self._sizes[needs] - 1
        if not size:
            del self._sizes[needs], self._heaps[needs]
        elif len(heap := self._heaps[needs]) > 2 * size + _SPARE:
            self._heaps[needs] = heap = [entry for entry in heap if entry[1] in self._places]
            heapq.heapify(heap)

    def first(self, blocked: AbstractSet[Hashable] = frozenset()) -> tuple[float, int] | None:
        """(due, id) of the first due of the classes that are not blocked; None if all are."""
        firsts = [self._first_of(heap) for needs, heap in self._heaps.items() if needs not in blocked]
        return min(firsts, default=None)

    def oldest(self) -> int:
        """Of at least one."""
        return next(iter(self._places))

    def newest(self) -> int:
        """Of at least one."""
        return next(reversed(self._places))

    def due_by(self, when: float, needs: Hashable) -> int:
        """How many of that class are due then or before."""
        return sum(due <= when for due, own in self._places.values() if own == needs)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert list(self._places) == sorted(self._places), "it is in order of age"
        assert self._heaps.keys() == self._sizes.keys() == {place.needs for place in self._places.values()}
        for needs, heap in self._heaps.items():
            own = {(place.due, id) for id, place in self._places.items() if place.needs == needs}
            assert len(own) == self._sizes[needs], "a class knows its size"
            assert own <= set(heap), "whoever waits comes to be next"
            assert self._first_of(heap) == min(own), "the first due is next"

    def _first_of(self, heap: list[tuple[float, int]]) -> tuple[float, int]:
        while heap[0][1] not in self._places:
            heapq.heappop(heap)
        return heap[0]
