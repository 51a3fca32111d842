"""FairQueue: the requests that wait for a place on a group, in the order of weighted fair queueing.

The next request has the lowest `priority` value that waits. Among the tenants with such requests, the one with the
least virtual time is next. Among the requests of this tenant and priority, the one that is due first is next.

A tenant's virtual time is the number of tokens that it was served, divided by its weight. A request is charged an
estimate when it is taken, and the true count when it ends (see `TokenCharge`). A tenant that returns from a pause
starts at the virtual time of those that wait, so that no tenant saves up credit. Every eighth request is taken without
regard to priority, so that no priority starves. When the queue is full, a new request displaces the newest request of
the tenant with the most requests per weight.

Requests of one `scheduling_class` can go to the same groups. Callers name the `blocked` classes, for which no group has
room. Requests of these classes are skipped, but keep their place, and their tenants keep their virtual time. The module
is pure: requests and classes are opaque, and callers pass all times.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from coatcheck.router.access.tenant import Tenant

Waiting = TypeVar("Waiting")
_ANY_PRIORITY_EVERY: Final = 8  # every eighth request is taken whatever its priority
_SPARE: Final = 16  # a heap of n waiting ids is rebuilt at more than 2 n + _SPARE entries
_NOTHING: Final[AbstractSet[Hashable]] = frozenset()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Requests that wait now, and requests taken, displaced and refused since the start."""

    waiting: int = 0
    taken: int = 0
    displaced: int = 0
    refused: int = 0


class TokenCharge:
    """The tokens that one request was charged, an estimate until `settle_tokens`."""

    __slots__ = ("_share", "tokens")

    def __init__(self, share: "_Share", tokens: float) -> None:
        self._share = share
        self.tokens = tokens

    def settle_tokens(self, tokens: float) -> None:
        """Charges `tokens`, the true count, in place of the estimate."""
        self._share.time += (tokens - self.tokens) / self._share.weight
        self.tokens = tokens


class _Share:
    """One tenant's virtual time, and its waiting requests by priority."""

    __slots__ = ("queues", "size", "time", "weight")

    def __init__(self) -> None:
        self.time = 0.0
        self.weight = 1.0
        self.size = 0
        self.queues: dict[int, _TenantQueue] = {}

    def first_priority(self, blocked: AbstractSet[Hashable]) -> int | None:
        """The lowest priority value at which a request of a class that is not blocked waits; None if there is none."""
        if not blocked:
            return min(self.queues) if self.queues else None
        return min([priority for priority, queue in self.queues.items() if not queue.classes <= blocked], default=None)


@dataclass(slots=True)
class _Entry(Generic[Waiting]):
    request: Waiting
    tenant: str
    priority: int
    tokens: float
    due: float
    scheduling_class: Hashable


class FairQueue(Generic[Waiting]):
    """At most `max_size` requests wait; only those added with `bounded=False` may exceed this."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._entries: OrderedDict[int, _Entry[Waiting]] = OrderedDict()  # by age
        self._shares: dict[str, _Share] = {}
        self._classes: Counter[Hashable] = Counter()  # class -> waiting requests
        self._ids = count(1)
        self._now = 0.0  # virtual time of the tenants that wait; it only grows
        self._taken = self._displaced = self._refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether `add` would accept a request of this tenant now."""
        return len(self._entries) < self.max_size or self._victim(tenant, priority) is not None

    def count_ahead(self, tenant: Tenant, priority: int, due: float, scheduling_class: Hashable = None) -> int:
        """The number of requests that are certainly taken before a new one: those of the same tenant and class whose
        `priority` value and due time are not higher."""
        share = self._shares.get(tenant.name)
        if share is None:
            return 0
        return sum(
            queue.count_due_by(due, scheduling_class) for other, queue in share.queues.items() if other <= priority
        )

    def waiting_in_class(self, scheduling_class: Hashable) -> int:
        """The number of waiting requests of the class."""
        return self._classes[scheduling_class]

    def add(
        self,
        request: Waiting,
        tenant: Tenant,
        *,
        priority: int = 0,
        tokens: float = 1.0,
        due: float = 0.0,
        scheduling_class: Hashable = None,
        bounded: bool = True,
    ) -> tuple[int, Waiting | None] | None:
        """Adds a request. Returns its id and the request that it displaced, if any; None if there is no room.

        `tokens`: estimate of the tokens that the request will be charged. `due`: order within the tenant and priority;
        requests with an equal `due` go in order of age. `bounded`: False adds the request even if the queue is full.
        """
        displaced: Waiting | None = None
        if bounded and len(self._entries) >= self.max_size:
            victim = self._victim(tenant, priority)
            if victim is None:
                self._refused += 1
                return None
            displaced = self._remove(victim).request
            self._displaced += 1
        share = self._share(tenant)
        if not share.size:
            share.time = max(share.time, self._now)
        id = next(self._ids)
        entry = self._entries[id] = _Entry(request, tenant.name, priority, tokens, due, scheduling_class)
        self._add_to_queue(id, entry)
        share.size += 1
        return id, displaced

    def reclassify(self, find_class: Callable[[Waiting], Hashable]) -> None:
        """Gives each waiting request the scheduling class that `find_class` returns for it. The order does not change.
        Takes O(n log n)."""
        self._classes.clear()
        for share in self._shares.values():
            share.queues.clear()
        for id, entry in self._entries.items():
            entry.scheduling_class = find_class(entry.request)
            self._add_to_queue(id, entry)

    def peek(self, blocked: AbstractSet[Hashable] = _NOTHING) -> Waiting | None:
        """The next request of a class that is not blocked; None if there is none."""
        id = self._next(blocked)
        return self._entries[id].request if id is not None else None

    def oldest(self) -> Waiting | None:
        """The request that has waited longest among those of the next request's tenant and priority."""
        id = self._next(_NOTHING)
        if id is None:
            return None
        next = self._entries[id]
        return self._entries[self._shares[next.tenant].queues[next.priority].oldest()].request

    def pop(self, blocked: AbstractSet[Hashable] = _NOTHING) -> tuple[Waiting, TokenCharge]:
        """Removes the next request of a class that is not blocked, and charges its tenant. There must be one."""
        id = self._next(blocked)
        assert id is not None, "all waiting classes are blocked"
        # Tenants whose requests are all blocked are left out: their virtual time stands still, and a tenant that
        # returns from a pause would start there, ahead of all that were served since.
        open_shares = (share for share in self._shares.values() if share.first_priority(blocked) is not None)
        self._now = max(self._now, min(share.time for share in open_shares))
        entry = self._remove(id)
        self._taken += 1
        return entry.request, self._charge(self._shares[entry.tenant], entry.tokens)

    def charge_unqueued(self, tenant: Tenant, tokens: float) -> TokenCharge:
        """Charges the tenant for a request that was sent without waiting, while the queue was empty."""
        share = self._share(tenant)
        share.time = max(share.time, self._now)
        self._now = share.time
        self._taken += 1
        return self._charge(share, tokens)

    def remove(self, id: int) -> bool:
        """Removes a request whose client has disconnected. Returns whether the request was still waiting."""
        if id not in self._entries:
            return False
        self._remove(id)
        return True

    def stats(self) -> QueueStats:
        """The counts for status and metrics."""
        return QueueStats(len(self._entries), self._taken, self._displaced, self._refused)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert sum(share.size for share in self._shares.values()) == len(self._entries), "sizes of the shares"
        classes = Counter(entry.scheduling_class for entry in self._entries.values())
        assert +self._classes == classes, "counts by class"
        for id, entry in self._entries.items():
            assert id in self._shares[entry.tenant].queues[entry.priority], "a request in the wrong queue"
        for share in self._shares.values():
            assert share.size == sum(len(queue) for queue in share.queues.values()), "size of a share"
            assert all(share.queues.values()), "an empty queue"
            for queue in share.queues.values():
                queue.check()
        assert list(self._entries) == sorted(self._entries), "order of age"

    def _next(self, blocked: AbstractSet[Hashable]) -> int | None:
        if self._classes.keys() <= blocked:
            return None
        ranked = [
            (priority, share)
            for share in self._shares.values()
            if share.size and (priority := share.first_priority(blocked)) is not None
        ]
        if (self._taken + 1) % _ANY_PRIORITY_EVERY == 0:
            share = min((share for _, share in ranked), key=lambda share: share.time)
            firsts = [first for queue in share.queues.values() if (first := queue.first(blocked)) is not None]
            return min(firsts)[1]
        urgent = min(priority for priority, _ in ranked)
        share = min((share for priority, share in ranked if priority == urgent), key=lambda share: share.time)
        first = share.queues[urgent].first(blocked)
        assert first is not None, "first_priority counts only classes that are not blocked"
        return first[1]

    def _add_to_queue(self, id: int, entry: _Entry[Waiting]) -> None:
        queues = self._shares[entry.tenant].queues
        queues.setdefault(entry.priority, _TenantQueue()).add(id, entry.due, entry.scheduling_class)
        self._classes[entry.scheduling_class] += 1

    def _victim(self, tenant: Tenant, priority: int) -> int | None:
        """The id of the request that a new one of `tenant` displaces: of the tenant with the most requests per weight,
        the newest of those with the highest `priority` value. None if that tenant is `tenant` itself and none of its
        requests has a higher value than the new one."""
        own = self._shares.get(tenant.name)
        mine = ((own.size if own else 0) + 1) / tenant.weight
        fullest, name = max(
            ((share.size / share.weight, name) for name, share in self._shares.items() if share.size),
            default=(0.0, ""),
        )
        if name == tenant.name or fullest <= mine:
            name = tenant.name
        share = self._shares.get(name)
        if share is None or not share.size:
            return None
        last = max(share.queues)
        if name == tenant.name and last <= priority:
            return None
        return share.queues[last].newest()

    def _share(self, tenant: Tenant) -> _Share:
        share = self._shares.setdefault(tenant.name, _Share())
        share.weight = tenant.weight  # the key file may have changed
        return share

    def _charge(self, share: _Share, tokens: float) -> TokenCharge:
        share.time += tokens / share.weight
        return TokenCharge(share, tokens)

    def _remove(self, id: int) -> _Entry[Waiting]:
        entry = self._entries.pop(id)
        share = self._shares[entry.tenant]
        queue = share.queues[entry.priority]
        queue.remove(id)
        if not queue:
            del share.queues[entry.priority]
        share.size -= 1
        self._classes[entry.scheduling_class] -= 1
        if not self._classes[entry.scheduling_class]:
            del self._classes[entry.scheduling_class]
        return entry


class _Place(NamedTuple):
    due: float
    scheduling_class: Hashable


class _TenantQueue:
    """The waiting requests of one tenant at one priority. Requests with equal due times go in order of age."""

    __slots__ = ("_heaps", "_places", "_sizes")

    def __init__(self) -> None:
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by age
        self._heaps: dict[Hashable, list[tuple[float, int]]] = {}  # by class: (due, id); also removed ids
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
        """(due, id) of the request that is due first among classes that are not blocked; None if all are blocked."""
        firsts = [self._first_of(heap) for own_class, heap in self._heaps.items() if own_class not in blocked]
        return min(firsts, default=None)

    def oldest(self) -> int:
        """The id that has waited longest; the queue must not be empty."""
        return next(iter(self._places))

    def newest(self) -> int:
        """The id that came last; the queue must not be empty."""
        return next(reversed(self._places))

    def count_due_by(self, when: float, scheduling_class: Hashable) -> int:
        """The number of requests of the class that are due at `when` or before."""
        return sum(due <= when for due, own_class in self._places.values() if own_class == scheduling_class)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert list(self._places) == sorted(self._places), "requests are in order of age"
        assert self._heaps.keys() == self._sizes.keys() == {place.scheduling_class for place in self._places.values()}
        for own_class, heap in self._heaps.items():
            own = {(place.due, id) for id, place in self._places.items() if place.scheduling_class == own_class}
            assert len(own) == self._sizes[own_class], "requests are counted by class"
            assert own <= set(heap), "every waiting request is in its heap"
            assert self._first_of(heap) == min(own), "the first due is next"

    def _first_of(self, heap: list[tuple[float, int]]) -> tuple[float, int]:
        while heap[0][1] not in self._places:
            heapq.heappop(heap)
        return heap[0]
