"""FairQueue: the requests that wait for a place on a group, in the order of weighted fair queueing.

The next request is of the lowest `priority` value that waits; among its tenants, of the one with the least virtual
time; among that tenant's requests, the one that is due first.

A tenant's virtual time is the tokens that it was served over its weight. A request is charged an estimate when it is
taken, and the true count when it ends (see `Served`). A tenant that returns from a pause starts at the virtual time of
those that wait, so that nobody saves up credit. Every eighth request is taken without regard to priority, so that none
starves. When the queue is full, the tenant with most requests for its weight loses its newest one.

Requests of one `scheduling_class` can go to the same groups. Callers name the `blocked` classes, for which no group has
room. Those are passed over, but their requests keep their place and their tenants keep their virtual time, so that they
are first when there is room. The module is pure: it knows neither groups nor clocks nor what a request is.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, TypeVar

from coatcheck.router.access.tenant import Tenant
from coatcheck.router.serving.level import TenantQueue

Waiting = TypeVar("Waiting")
# Every eighth request is taken whatever its priority.
_ANY_PRIORITY_EVERY: Final = 8
_NOTHING: Final[AbstractSet[Hashable]] = frozenset()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Requests that wait now, and those taken, displaced by others and refused since the start."""

    waiting: int = 0
    taken: int = 0
    displaced: int = 0
    refused: int = 0


class Served:
    """The tokens that one request was charged, an estimate until `settle`."""

    __slots__ = ("_tenant", "tokens")

    def __init__(self, tenant: "_Share", tokens: float) -> None:
        self._tenant = tenant
        self.tokens = tokens

    def settle(self, tokens: float) -> None:
        """Charges `tokens`, the true count, in place of the estimate."""
        self._tenant.time += (tokens - self.tokens) / self._tenant.weight
        self.tokens = tokens


class _Share:
    """One tenant's virtual time and its waiting requests by priority."""

    __slots__ = ("levels", "size", "time", "weight")

    def __init__(self) -> None:
        self.time = 0.0
        self.weight = 1.0
        self.size = 0
        self.levels: dict[int, TenantQueue] = {}

    def first_priority(self, blocked: AbstractSet[Hashable]) -> int | None:
        """The lowest priority value at which a request of a class that is not blocked waits; None if there is none."""
        if not blocked:
            return min(self.levels) if self.levels else None
        return min([rank for rank, level in self.levels.items() if not level.classes <= blocked], default=None)


@dataclass(slots=True)
class _Entry(Generic[Waiting]):
    what: Waiting
    tenant: str
    priority: int
    tokens: float
    due: float
    scheduling_class: Hashable


class FairQueue(Generic[Waiting]):
    """Holds at most `most` requests, not counting those put in with `bounded=False`, which always find room."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[int, _Entry[Waiting]] = OrderedDict()  # by age
        self._shares: dict[str, _Share] = {}
        self._classes: Counter[Hashable] = Counter()  # class -> waiting requests
        self._ids = count(1)
        self._now = 0.0  # the virtual time of those that wait; it only grows
        self._taken = self._displaced = self._refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether `put` would accept a request of this tenant now."""
        return len(self._entries) < self.most or self._victim(tenant, priority) is not None

    def ahead(self, tenant: Tenant, priority: int, due: float, scheduling_class: Hashable = None) -> int:
        """The number of requests that are certainly taken before a new one: those of the same tenant and class that
        are no less urgent and due no later."""
        share = self._shares.get(tenant.name)
        if share is None:
            return 0
        return sum(level.due_by(due, scheduling_class) for rank, level in share.levels.items() if rank <= priority)

    def waiting(self, scheduling_class: Hashable) -> int:
        """The number of waiting requests of the class."""
        return self._classes[scheduling_class]

    def put(
        self,
        what: Waiting,
        tenant: Tenant,
        *,
        priority: int = 0,
        tokens: float = 1.0,
        due: float = 0.0,
        scheduling_class: Hashable = None,
        bounded: bool = True,
    ) -> tuple[int, Waiting | None] | None:
        """Adds a request. Returns its id and the request that it displaced, if any; None if there is no room.

        `tokens`: estimate of what it will be charged. `due`: order within its tenant and priority; equal ones go in
        order of age. `bounded`: False accepts it even if the queue is full.
        """
        displaced: Waiting | None = None
        if bounded and len(self._entries) >= self.most:
            victim = self._victim(tenant, priority)
            if victim is None:
                self._refused += 1
                return None
            displaced = self._remove(victim).what
            self._displaced += 1
        share = self._share(tenant)
        if not share.size:
            share.time = max(share.time, self._now)
        id = next(self._ids)
        entry = self._entries[id] = _Entry(what, tenant.name, priority, tokens, due, scheduling_class)
        self._add_to_level(id, entry)
        share.size += 1
        return id, displaced

    def reclassify(self, find_class: Callable[[Waiting], Hashable]) -> None:
        """Gives each waiting request the scheduling class that `find_class` returns for it; each keeps its place. Takes
        O(n log n)."""
        self._classes.clear()
        for share in self._shares.values():
            share.levels.clear()
        for id, entry in self._entries.items():
            entry.scheduling_class = find_class(entry.what)
            self._add_to_level(id, entry)

    def peek(self, blocked: AbstractSet[Hashable] = _NOTHING) -> Waiting | None:
        """The next request of a class that is not blocked; None if there is none."""
        id = self._next(blocked)
        return self._entries[id].what if id is not None else None

    def oldest(self) -> Waiting | None:
        """Of the next request's tenant and priority, the request that has waited longest; it may be due later."""
        id = self._next(_NOTHING)
        if id is None:
            return None
        next = self._entries[id]
        return self._entries[self._shares[next.tenant].levels[next.priority].oldest()].what

    def take(self, blocked: AbstractSet[Hashable] = _NOTHING) -> tuple[Waiting, Served]:
        """Removes the next request of a class that is not blocked, and charges its tenant. There must be one."""
        id = self._next(blocked)
        assert id is not None, "all waiting classes are blocked"
        # Tenants whose requests are all blocked are left out: their virtual time stands still, and a tenant that
        # returns from a pause would start there, ahead of all that were served since.
        open_shares = (share for share in self._shares.values() if share.first_priority(blocked) is not None)
        self._now = max(self._now, min(share.time for share in open_shares))
        entry = self._remove(id)
        self._taken += 1
        return entry.what, self._charge(self._shares[entry.tenant], entry.tokens)

    def pass_by(self, tenant: Tenant, tokens: float) -> Served:
        """Charges the tenant for a request that was placed without waiting, while the queue was empty."""
        share = self._share(tenant)
        share.time = max(share.time, self._now)
        self._now = share.time
        self._taken += 1
        return self._charge(share, tokens)

    def drop(self, id: int) -> bool:
        """Removes a request whose client is gone. Returns whether it was still waiting."""
        if id not in self._entries:
            return False
        self._remove(id)
        return True

    def stats(self) -> QueueStats:
        """The counts for status and metrics."""
        return QueueStats(len(self._entries), self._taken, self._displaced, self._refused)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert sum(share.size for share in self._shares.values()) == len(self._entries), "the shares hold what waits"
        classes = Counter(entry.scheduling_class for entry in self._entries.values())
        assert +self._classes == classes, "the counts by class"
        for id, entry in self._entries.items():
            assert id in self._shares[entry.tenant].levels[entry.priority], "each at its place"
        for share in self._shares.values():
            assert share.size == sum(len(level) for level in share.levels.values()), "a share knows its size"
            assert all(share.levels.values()), "no level is empty"
            for level in share.levels.values():
                level.check()
        assert list(self._entries) == sorted(self._entries), "all are in order of age"

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
            firsts = [first for level in share.levels.values() if (first := level.first(blocked)) is not None]
            return min(firsts)[1]
        urgent = min(priority for priority, _ in ranked)
        share = min((share for priority, share in ranked if priority == urgent), key=lambda share: share.time)
        first = share.levels[urgent].first(blocked)
        assert first is not None, "first_priority counts only classes that are not blocked"
        return first[1]

    def _add_to_level(self, id: int, entry: _Entry[Waiting]) -> None:
        levels = self._shares[entry.tenant].levels
        levels.setdefault(entry.priority, TenantQueue()).add(id, entry.due, entry.scheduling_class)
        self._classes[entry.scheduling_class] += 1

    def _victim(self, tenant: Tenant, priority: int) -> int | None:
        """The id of the request that a new one of this tenant displaces: the newest of the least urgent, of the tenant
        with most requests for its weight. None if that is `tenant` and none of its requests is less urgent."""
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
        last = max(share.levels)
        if name == tenant.name and last <= priority:
            return None
        return share.levels[last].newest()

    def _share(self, tenant: Tenant) -> _Share:
        share = self._shares.setdefault(tenant.name, _Share())
        share.weight = tenant.weight  # which may have changed since
        return share

    def _charge(self, share: _Share, tokens: float) -> Served:
        share.time += tokens / share.weight
        return Served(share, tokens)

    def _remove(self, id: int) -> _Entry[Waiting]:
        entry = self._entries.pop(id)
        share = self._shares[entry.tenant]
        level = share.levels[entry.priority]
        level.remove(id)
        if not level:
            del share.levels[entry.priority]
        share.size -= 1
        self._classes[entry.scheduling_class] -= 1
        if not self._classes[entry.scheduling_class]:
            del self._classes[entry.scheduling_class]
        return entry
