"""FairQueue: the requests that wait for room on a group, in the order of weighted fair queueing.

The next request has the lowest `priority` value that waits. Among the tenants with such requests, the one with the
least virtual time is next. Among the requests of this tenant and priority, the request that is due first is next.

A tenant's virtual time is the number of tokens that it was served, divided by its weight. A request is charged an
estimate when it is taken, and the true count when it ends (see `TokenCharge`). A tenant that returns from a pause
starts at the virtual time of the waiting tenants, so that no tenant saves up credit. Every eighth request is taken
without regard to priority, so that no priority starves. When the queue is full, a new request displaces the newest
request of the tenant with the most requests per weight.

Requests of one `scheduling_class` can go to the same groups. Callers name the `blocked` classes, for which no group has
room. Requests of these classes are skipped, but stay in the queue, and their tenants keep their virtual time. The
module is pure: requests and classes are opaque, and callers pass all times.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

from coatcheck.router.access.tenant import Tenant

_ANY_PRIORITY_EVERY: Final = 8  # every eighth request is taken whatever its priority
_NOTHING: Final[AbstractSet[Hashable]] = frozenset()


class QueueFull(Exception):
    """The queue is full, and the new request displaces no other."""


@dataclass(eq=False, kw_only=True)
class QueueEntry:
    """What the order of a waiting request depends on. Subclass it to add what the caller needs.

    `tokens`: estimate of the tokens that the request will be charged. `due`: order within the tenant and priority;
    requests with an equal `due` go in order of age. `id`: order of age, set by `FairQueue.add`.
    """

    tenant: Tenant
    priority: int = 0
    tokens: float = 1.0
    due: float = 0.0
    scheduling_class: Hashable = None
    id: int = 0


Entry = TypeVar("Entry", bound=QueueEntry)


class TokenCharge:
    """The tokens that one request was charged, an estimate until `settle_tokens`."""

    __slots__ = ("_share", "tokens")

    def __init__(self, share: "_Share[Any]", tokens: float) -> None:
        self._share = share
        self.tokens = tokens

    def settle_tokens(self, tokens: float) -> None:
        """Charges `tokens`, the true count, in place of the estimate."""
        self._share.virtual_time += (tokens - self.tokens) / self._share.weight
        self.tokens = tokens


class FairQueue(Generic[Entry]):
    """At most `max_size` requests wait; only those added with `bounded=False` may exceed this."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._shares: dict[str, _Share[Entry]] = {}
        self._classes: Counter[Hashable] = Counter()  # class -> waiting requests
        self._ids = count(1)
        self._virtual_now = 0.0  # where a tenant starts that returns from a pause; it only grows
        self._taken = 0

    def __len__(self) -> int:
        return self._classes.total()

    def has_room(self, tenant: Tenant, priority: int) -> bool:
        """Whether `add` would accept a request of this tenant now."""
        return len(self) < self.max_size or self._victim(tenant, priority) is not None

    def count_ahead(self, tenant: Tenant, priority: int, due: float, scheduling_class: Hashable = None) -> int:
        """The number of requests that are certainly taken before a new one: those of the same tenant and class whose
        `priority` value and due time are not higher."""
        share = self._shares.get(tenant.name)
        if share is None:
            return 0
        return sum(
            bisect_right(queue.by_class.get(scheduling_class, ()), due, key=itemgetter(0))
            for other, queue in share.queues.items()
            if other <= priority
        )

    @property
    def classes(self) -> AbstractSet[Hashable]:
        """The scheduling classes of the waiting requests."""
        return self._classes.keys()

    def waiting_in_class(self, scheduling_class: Hashable) -> int:
        """The number of waiting requests of the class."""
        return self._classes[scheduling_class]

    def add(self, entry: Entry, *, bounded: bool = True) -> Entry | None:
        """Adds a request. Returns the request that it displaces, if any. `bounded`: False adds the request even if the
        queue is full. Raises QueueFull."""
        displaced: Entry | None = None
        if bounded and len(self) >= self.max_size:
            displaced = self._victim(entry.tenant, entry.priority)
            if displaced is None:
                raise QueueFull
            self.remove(displaced)
        share = self._share(entry.tenant)
        if not share.queues:
            share.virtual_time = max(share.virtual_time, self._virtual_now)
        entry.id = next(self._ids)
        share.queues.setdefault(entry.priority, _TenantQueue()).add(entry)
        self._classes[entry.scheduling_class] += 1
        return displaced

    def reclassify(self, find_class: Callable[[Entry], Hashable]) -> None:
        """Gives each waiting request the scheduling class that `find_class` returns for it. The order does not change.
        Takes O(n log n)."""
        self._classes.clear()
        for share in self._shares.values():
            for priority, queue in share.queues.items():
                share.queues[priority] = reclassified = _TenantQueue[Entry]()
                for entry in queue.by_age.values():
                    entry.scheduling_class = find_class(entry)
                    reclassified.add(entry)
                    self._classes[entry.scheduling_class] += 1

    def peek(self, blocked: AbstractSet[Hashable] = _NOTHING) -> Entry | None:
        """The next request of a class that is not blocked; None if there is none."""
        if self._classes.keys() <= blocked:
            return None
        ranked = [
            (priority, share)
            for share in self._shares.values()
            if (priority := share.first_priority(blocked)) is not None
        ]
        if (self._taken + 1) % _ANY_PRIORITY_EVERY == 0:
            share = min((share for _, share in ranked), key=lambda share: share.virtual_time)
            firsts = [first for queue in share.queues.values() if (first := queue.first(blocked)) is not None]
            return min(firsts)[2]
        urgent = min(priority for priority, _ in ranked)
        share = min((share for priority, share in ranked if priority == urgent), key=lambda share: share.virtual_time)
        first = share.queues[urgent].first(blocked)
        assert first is not None, "first_priority counts only classes that are not blocked"
        return first[2]

    def oldest(self) -> Entry | None:
        """The request that has waited longest among those of the next request's tenant and priority."""
        following = self.peek()
        if following is None:
            return None
        queue = self._shares[following.tenant.name].queues[following.priority]
        return next(iter(queue.by_age.values()))

    def pop(self, blocked: AbstractSet[Hashable] = _NOTHING) -> tuple[Entry, TokenCharge]:
        """Removes the next request of a class that is not blocked, and charges its tenant. There must be one."""
        entry = self.peek(blocked)
        assert entry is not None, "all waiting classes are blocked"
        # Tenants whose requests are all blocked are left out: their virtual time stands still, and a tenant that
        # returns from a pause would start there, ahead of all that were served since.
        open_shares = (share for share in self._shares.values() if share.first_priority(blocked) is not None)
        self._virtual_now = max(self._virtual_now, min(share.virtual_time for share in open_shares))
        self.remove(entry)
        self._taken += 1
        return entry, self._charge(self._shares[entry.tenant.name], entry.tokens)

    def charge_unqueued(self, tenant: Tenant, tokens: float) -> TokenCharge:
        """Charges the tenant for a request that was sent without waiting, while the queue was empty."""
        share = self._share(tenant)
        share.virtual_time = max(share.virtual_time, self._virtual_now)
        self._virtual_now = share.virtual_time
        self._taken += 1
        return self._charge(share, tokens)

    def remove(self, entry: Entry) -> bool:
        """Removes a request whose client has disconnected. Returns whether the request was still waiting."""
        queues = self._shares[entry.tenant.name].queues
        queue = queues.get(entry.priority)
        if queue is None or entry.id not in queue.by_age:
            return False
        queue.remove(entry)
        if not queue.by_age:
            del queues[entry.priority]
        self._classes[entry.scheduling_class] -= 1
        if not self._classes[entry.scheduling_class]:
            del self._classes[entry.scheduling_class]
        return True

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        queues = [waiting for share in self._shares.values() for waiting in share.queues.values()]
        classes = Counter(entry.scheduling_class for waiting in queues for entry in waiting.by_age.values())
        assert self._classes == classes, "counts by class"
        for waiting in queues:
            assert waiting.by_age, "an empty queue"
            assert list(waiting.by_age) == sorted(waiting.by_age), "order of age"
            ordered = sorted((entry.due, id, entry) for id, entry in waiting.by_age.items())
            assert ordered == sorted(keyed for by_due in waiting.by_class.values() for keyed in by_due)
            for own_class, by_due in waiting.by_class.items():
                assert by_due == sorted(by_due), "order of due times"
                assert {entry.scheduling_class for _, _, entry in by_due} == {own_class}

    def _victim(self, tenant: Tenant, priority: int) -> Entry | None:
        """The request that a new one of `tenant` displaces: of the tenant with the most requests per weight, the newest
        of those with the highest `priority` value. None if that tenant is `tenant` itself and none of its requests has
        a higher value than the new one."""
        own = self._shares.get(tenant.name)
        mine = ((own.size if own else 0) + 1) / tenant.weight
        fullest, name = max(
            ((share.size / share.weight, name) for name, share in self._shares.items()), default=(0.0, "")
        )
        if name == tenant.name or fullest <= mine:
            name = tenant.name
        share = self._shares.get(name)
        if share is None or not share.queues:
            return None
        last = max(share.queues)
        if name == tenant.name and last <= priority:
            return None
        return next(reversed(share.queues[last].by_age.values()))

    def _share(self, tenant: Tenant) -> "_Share[Entry]":
        share = self._shares.setdefault(tenant.name, _Share())
        share.weight = tenant.weight  # the key file may have changed
        return share

    def _charge(self, share: "_Share[Entry]", tokens: float) -> TokenCharge:
        share.virtual_time += tokens / share.weight
        return TokenCharge(share, tokens)


class _Share(Generic[Entry]):
    """One tenant's virtual time, and its waiting requests by priority."""

    __slots__ = ("queues", "virtual_time", "weight")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.weight = 1.0
        self.queues: dict[int, _TenantQueue[Entry]] = {}  # none is empty

    @property
    def size(self) -> int:
        """Number of waiting requests."""
        return sum(len(queue.by_age) for queue in self.queues.values())

    def first_priority(self, blocked: AbstractSet[Hashable]) -> int | None:
        """The lowest priority value at which a request of a class that is not blocked waits; None if there is none."""
        if not blocked:
            return min(self.queues, default=None)
        open_priorities = [priority for priority, queue in self.queues.items() if not queue.by_class.keys() <= blocked]
        return min(open_priorities, default=None)


class _TenantQueue(Generic[Entry]):
    """The waiting requests of one tenant at one priority: by age, and of each class in order of (due time, age)."""

    __slots__ = ("by_age", "by_class")

    def __init__(self) -> None:
        # An OrderedDict, because a plain dict finds its first key by a scan of all deleted slots.
        self.by_age: OrderedDict[int, Entry] = OrderedDict()
        self.by_class: dict[Hashable, list[tuple[float, int, Entry]]] = {}  # (due, id, entry) in order

    def add(self, entry: Entry) -> None:
        self.by_age[entry.id] = entry
        insort(self.by_class.setdefault(entry.scheduling_class, []), (entry.due, entry.id, entry))

    def remove(self, entry: Entry) -> None:
        del self.by_age[entry.id]
        own = self.by_class[entry.scheduling_class]
        del own[bisect_left(own, (entry.due, entry.id))]
        if not own:
            del self.by_class[entry.scheduling_class]

    def first(self, blocked: AbstractSet[Hashable]) -> tuple[float, int, Entry] | None:
        """(due, id, entry) of the request that is due first among classes that are not blocked, if there is one."""
        firsts = [by_due[0] for own_class, by_due in self.by_class.items() if own_class not in blocked]
        return min(firsts, default=None)
