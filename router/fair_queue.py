"""FairQueue: who waits for a place on a group, and who is next.

    next = of the lowest priority, the tenant that was served least for its weight, and its request that is due first

What a tenant was served is counted in tokens over its weight, its virtual time: a guess when a request is taken, put
right when it ends (see `Served`). A tenant that comes back from a pause starts where those that wait are, so that
nobody saves up. One of every few taken is so without regard to priority: nobody starves. When it is full, whoever
fills it most for their weight gives way.

`needs` is the class of a request: requests of one class can go to the same groups. Callers say which classes are
`blocked`, because no group has room for them. These are passed over, but their requests keep their place and their
tenants keep their virtual time, so that they are first when there is room. Pure: it does not know groups, clocks or
what a request is.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from typing import Final, Generic, TypeVar

from .level import Level
from .tenant import Tenant

Waiting = TypeVar("Waiting")
# One of so many is taken whatever its priority.
_ANY_PRIORITY_EVERY: Final = 8
_NOTHING: Final[AbstractSet[Hashable]] = frozenset()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """How many wait, and how many were taken, displaced by others, and refused, since the start."""

    waiting: int = 0
    taken: int = 0
    displaced: int = 0
    refused: int = 0


class Served:
    """What one request was charged, until it is known what it took."""

    __slots__ = ("_tenant", "tokens")

    def __init__(self, tenant: "_Share", tokens: float) -> None:
        self._tenant = tenant
        self.tokens = tokens

    def settle(self, tokens: float) -> None:
        """It took so many."""
        self._tenant.time += (tokens - self.tokens) / self._tenant.weight
        self.tokens = tokens


class _Share:
    """One tenant's: its virtual time, and what it has waiting, by priority."""

    __slots__ = ("levels", "size", "time", "weight")

    def __init__(self) -> None:
        self.time = 0.0
        self.weight = 1.0
        self.size = 0
        self.levels: dict[int, Level] = {}

    def first_priority(self, blocked: AbstractSet[Hashable]) -> int | None:
        """The most urgent priority at which something waits that is not blocked; None if there is none."""
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
    needs: Hashable


class FairQueue(Generic[Waiting]):
    """Holds at most `most`; what is put in with `bounded=False` is taken in whatever its size."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[int, _Entry[Waiting]] = OrderedDict()  # by age
        self._shares: dict[str, _Share] = {}
        self._classes: Counter[Hashable] = Counter()  # how many requests of each class wait
        self._ids = count(1)
        self._now = 0.0  # the virtual time of those that wait; it only grows
        self._taken = self._displaced = self._refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether one more of this tenant would be taken in now."""
        return len(self._entries) < self.most or self._victim(tenant, priority) is not None

    def ahead(self, tenant: Tenant, priority: int, due: float, needs: Hashable = None) -> int:
        """How many requests are certainly taken before a new one of this tenant and class: those of both that are no
        less urgent and due no later."""
        share = self._shares.get(tenant.name)
        return sum(level.due_by(due, needs) for rank, level in share.levels.items() if rank <= priority) if share else 0

    def waiting(self, needs: Hashable) -> int:
        """How many requests of the class `needs` wait."""
        return self._classes[needs]

    def put(
        self,
        what: Waiting,
        tenant: Tenant,
        *,
        priority: int = 0,
        tokens: float = 1.0,
        due: float = 0.0,
        needs: Hashable = None,
        bounded: bool = True,
    ) -> tuple[int, Waiting | None] | None:
        """Takes one in that will need about so many tokens, and is due then (those that are due together go in order
        of age): its id, and whom it displaced if it did. None: no room."""
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
        entry = self._entries[id] = _Entry(what, tenant.name, priority, tokens, due, needs)
        self._stand(id, entry)
        share.size += 1
        return id, displaced

    def regroup(self, needs: Callable[[Waiting], Hashable]) -> None:
        """Gives each waiting request the class that `needs` now returns for it; each keeps its place. O(n log n)."""
        self._classes.clear()
        for share in self._shares.values():
            share.levels.clear()
        for id, entry in self._entries.items():
            entry.needs = needs(entry.what)
            self._stand(id, entry)

    def peek(self, blocked: AbstractSet[Hashable] = _NOTHING) -> Waiting | None:
        """The next request of a class that is not blocked; None if there is none."""
        id = self._next(blocked)
        return self._entries[id].what if id is not None else None

    def oldest(self) -> Waiting | None:
        """Of those of the next one's tenant and priority, who has waited longest: it may be due later."""
        id = self._next(_NOTHING)
        if id is None:
            return None
        next = self._entries[id]
        return self._entries[self._shares[next.tenant].levels[next.priority].oldest()].what

    def take(self, blocked: AbstractSet[Hashable] = _NOTHING) -> tuple[Waiting, Served]:
        """Removes the next request of a class that is not blocked, and charges its tenant. There must be one."""
        id = self._next(blocked)
        assert id is not None, "nobody waits that is not blocked"
        # Without the tenants that are blocked: their virtual time stands still, and a tenant that comes back from a
        # pause would start there, ahead of all that were served since.
        open_shares = (share for share in self._shares.values() if share.first_priority(blocked) is not None)
        self._now = max(self._now, min(share.time for share in open_shares))
        entry = self._remove(id)
        self._taken += 1
        return entry.what, self._charge(self._shares[entry.tenant], entry.tokens)

    def pass_by(self, tenant: Tenant, tokens: float) -> Served:
        """Charges for one that need not wait, since nobody does."""
        share = self._share(tenant)
        share.time = max(share.time, self._now)
        self._now = share.time
        self._taken += 1
        return self._charge(share, tokens)

    def drop(self, id: int) -> bool:
        """It waits no longer; whether it did."""
        if id not in self._entries:
            return False
        self._remove(id)
        return True

    def stats(self) -> QueueStats:
        """Its counts."""
        return QueueStats(len(self._entries), self._taken, self._displaced, self._refused)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert sum(share.size for share in self._shares.values()) == len(self._entries), "the shares hold what waits"
        classes = Counter(entry.needs for entry in self._entries.values())
        assert +self._classes == classes, "how many wait of each class is known"
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
        assert first is not None, "something at its first priority is not blocked"
        return first[1]

    def _stand(self, id: int, entry: _Entry[Waiting]) -> None:
        levels = self._shares[entry.tenant].levels
        levels.setdefault(entry.priority, Level()).add(id, entry.due, entry.needs)
        self._classes[entry.needs] += 1

    def _victim(self, tenant: Tenant, priority: int) -> int | None:
        """Who would give way to one more of this tenant: the newest of the least urgent, of whoever has most waiting
        for its weight. Itself, if that is the newcomer's tenant and nobody there is less urgent."""
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
        self._classes[entry.needs] -= 1
        if not self._classes[entry.needs]:
            del self._classes[entry.needs]
        return entry
