"""TenantQueue: the waiting requests of one tenant at one priority, by due time. A full queue drops the newest.

Requests of one `scheduling_class` can go to the same groups. Classes for which no group has room are `blocked`; the
first due of the others is found without looking at the requests of a blocked class.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

_SPARE = 16  # removed ids that a heap may hold beyond its own size before it is rebuilt


class _Place(NamedTuple):
    due: float
    scheduling_class: Hashable


class TenantQueue:
    """Request ids with their due times and classes; equal due times go in order of age."""

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

    def add(self, id: int, due: float, scheduling_class: Hashable) -> None:
        """Adds the newest request; ids grow."""
        self._places[id] = _Place(due, scheduling_class)
        heapq.heappush(self._heaps.setdefault(scheduling_class, []), (due, id))
        self._sizes[scheduling_class] = self._sizes.get(scheduling_class, 0) + 1

    def remove(self, id: int) -> None:
        """Removes a request that was taken, displaced or dropped."""
        own_class = self._places.pop(id).scheduling_class
        self._sizes[own_class] = size = self._sizes[own_class] - 1
        if not size:
            del self._sizes[own_class], self._heaps[own_class]
        elif len(heap := self._heaps[own_class]) > 2 * size + _SPARE:
            self._heaps[own_class] = heap = [entry for entry in heap if entry[1] in self._places]
            heapq.heapify(heap)

    def first(self, blocked: AbstractSet[Hashable] = frozenset()) -> tuple[float, int] | None:
        """(due, id) of the first due of the classes that are not blocked; None if all are."""
        firsts = [self._first_of(heap) for own_class, heap in self._heaps.items() if own_class not in blocked]
        return min(firsts, default=None)

    def oldest(self) -> int:
        """The id that has waited longest; the level must not be empty."""
        return next(iter(self._places))

    def newest(self) -> int:
        """The id that came last; the level must not be empty."""
        return next(reversed(self._places))

    def due_by(self, when: float, scheduling_class: Hashable) -> int:
        """The number of requests of the class that are due at `when` or before."""
        return sum(due <= when for due, own_class in self._places.values() if own_class == scheduling_class)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert list(self._places) == sorted(self._places), "it is in order of age"
        assert self._heaps.keys() == self._sizes.keys() == {place.scheduling_class for place in self._places.values()}
        for own_class, heap in self._heaps.items():
            own = {(place.due, id) for id, place in self._places.items() if place.scheduling_class == own_class}
            assert len(own) == self._sizes[own_class], "the sizes by class"
            assert own <= set(heap), "every waiting request is in its heap"
            assert self._first_of(heap) == min(own), "the first due is next"

    def _first_of(self, heap: list[tuple[float, int]]) -> tuple[float, int]:
        while heap[0][1] not in self._places:
            heapq.heappop(heap)
        return heap[0]
