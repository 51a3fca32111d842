"""Evictor: which evictable block of a tier is evicted next.

A block is *evictable* while no sequence and no copy uses it. Each tier (device pool, host pool) has an evictor. A block
is evicted only after the blocks that follow it in the same prompt, because a suffix is useless without its prefix. So
only *leaves*, evictable blocks without evictable children, are candidates. They stand in four queues, emptied in this
order:

    unwanted    a request said that it is not needed again (retention priority 0); oldest first
    ordinary    all others, in the order of an `EvictionPolicy`
    protected   ordinary blocks of tenants below their fair share of the tier; set aside when the policy picks them
    retained    a request asked to keep it; lowest priority first. At most RETAINED_SHARE of the tier is retained

The protection keeps a tenant that floods the cache from evicting the prefixes of all other tenants.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coatcheck.workers.core.cache_reasons import EvictionMark, EvictionReason, Tier
from coatcheck.workers.kv.eviction_policy import CandidateHeap, EvictionCandidate, EvictionPolicy, LRUPolicy
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry

# A tenant is protected while it has at most PROTECTED_SHARE of an equal share of the evictable blocks, and has made a
# request within the last PROTECTION_SECONDS.
PROTECTED_SHARE: Final = 0.5
PROTECTION_SECONDS: Final = 600.0
# The share of a tier's blocks that requests can retain. Beyond it the lowest priorities become ordinary.
RETAINED_SHARE: Final = 0.25


@dataclass(slots=True, eq=False)
class _Entry:
    """An evictable block. `candidate` is None while it has evictable children."""

    prefix: Prefix
    order: int
    candidate: EvictionCandidate | None = None


class Evictor:
    """The evictable blocks of a tier of `capacity` blocks. Operations take amortised O(log) of their number."""

    def __init__(
        self, registry: PrefixRegistry, policy: EvictionPolicy, capacity: int, tier: Tier = Tier.DEVICE
    ) -> None:
        self.registry = registry
        self.num_evictions: Counter[EvictionReason] = Counter()
        self._tier = tier
        self._max_retained = int(capacity * RETAINED_SHARE)
        self._entries: dict[bytes, _Entry] = {}
        self._num_added = 0
        self._children: Counter[bytes] = Counter()  # evictable children, by the parent's hash
        self._tenants: Counter[str] = Counter()  # evictable blocks
        self._unwanted = LRUPolicy()
        self._ordinary = policy
        self._protected: dict[str, deque[EvictionCandidate]] = {}  # by tenant
        self._retained = CandidateHeap()  # by (priority, until when)
        self._retained_hashes: set[bytes] = set()  # of leaves and of blocks with children
        self._expiries: list[tuple[float, bytes]] = []  # a heap of when retentions end; may hold outdated entries
        self._protection_checked_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prefix: Prefix) -> bool:
        entry = self._entries.get(prefix.block_hash)
        return entry is not None and entry.prefix is prefix

    def add_block(self, prefix: Prefix) -> None:
        """Make a block evictable. Add the blocks of a sequence deepest first."""
        block_hash = prefix.block_hash
        assert block_hash not in self._entries, "added twice"
        self._num_added += 1
        entry = self._entries[block_hash] = _Entry(prefix, self._num_added)
        self._tenants[prefix.tenant] += 1
        if prefix.claims.in_force(self.registry.now)[0]:
            self._retained_hashes.add(block_hash)
            self._schedule_expiry(prefix)
        if prefix.parent_hash:
            self._children[prefix.parent_hash] += 1
            if (parent := self._entries.get(prefix.parent_hash)) is not None:
                self._cancel_candidate(parent)
        if block_hash not in self._children:
            self._add_candidate(entry)

    def remove_block(self, prefix: Prefix) -> None:
        """Remove a block that is in use again, or evicted."""
        entry = self._entries.pop(prefix.block_hash)
        self._retained_hashes.discard(prefix.block_hash)
        self._cancel_candidate(entry)
        self._tenants[prefix.tenant] -= 1
        if not self._tenants[prefix.tenant]:
            del self._tenants[prefix.tenant]
            self._protected.pop(prefix.tenant, None)
        if prefix.parent_hash:
            self._children[prefix.parent_hash] -= 1
            if not self._children[prefix.parent_hash]:
                del self._children[prefix.parent_hash]
                if (parent := self._entries.get(prefix.parent_hash)) is not None:
                    self._add_candidate(parent)

    def evict_block(self) -> Prefix:
        """Remove and return the block to evict next. There must be an evictable block."""
        now = self.registry.now
        self._end_expired_retentions()
        self._limit_retained()
        if now >= self._protection_checked_at + 1:
            self._protection_checked_at = now
            self._end_protections()
        candidate, reason = self._pop_candidate()
        self.num_evictions[reason] += 1
        self.remove_block(candidate.prefix)
        candidate.prefix.eviction = EvictionMark(now, self._tier, reason)
        return candidate.prefix

    def check(self, evictable: Iterable[Prefix]) -> None:
        """Raise AssertionError unless exactly the blocks `evictable` are here and every leaf is a candidate."""
        expected = {prefix.block_hash: prefix for prefix in evictable}
        assert expected == {block_hash: entry.prefix for block_hash, entry in self._entries.items()}, "other blocks"
        children = Counter(prefix.parent_hash for prefix in expected.values() if prefix.parent_hash)
        assert children == self._children, "children miscounted"
        leaves = {block_hash for block_hash in expected if block_hash not in children}
        candidates = {name: entry.candidate for name, entry in self._entries.items() if entry.candidate is not None}
        assert leaves == set(candidates), "a leaf is no candidate, or a block with children is one"
        assert not any(candidate.is_cancelled for candidate in candidates.values()), "a leaf's candidate is cancelled"
        assert self._tenants == Counter(prefix.tenant for prefix in expected.values()), "tenants miscounted"
        assert self._retained_hashes <= set(expected), "a retained block is not here"
        assert self._retained_hashes <= {block_hash for _, block_hash in self._expiries}, "a retention never ends"

    # Candidates and their queues

    def _add_candidate(self, entry: _Entry) -> None:
        """Put a leaf into the queue where it belongs now."""
        prefix = entry.prefix
        candidate = entry.candidate = EvictionCandidate(prefix, entry.order)
        if prefix.block_hash in self._retained_hashes:
            self._retained.push(prefix.claims.in_force(self.registry.now), candidate)
        elif prefix.claims.is_unwanted(self.registry.now):
            self._unwanted.push(candidate)
        else:
            self._ordinary.push(candidate)
        set_aside = self._protected.get(prefix.tenant)
        if set_aside and not self._is_protected(prefix.tenant):
            # The tenant has grown above its share by one block, so one of its blocks can go.
            self._return_to_ordinary(set_aside, 1)

    def _cancel_candidate(self, entry: _Entry) -> None:
        if entry.candidate is not None:
            entry.candidate.is_cancelled = True
            entry.candidate = None

    def _pop_candidate(self) -> tuple[EvictionCandidate, EvictionReason]:
        while (candidate := self._unwanted.pop()) is not None:
            if candidate.prefix.claims.is_unwanted(self.registry.now):
                return candidate, EvictionReason.UNWANTED
            self._add_candidate(self._entries[candidate.prefix.block_hash])  # requested again since
        reason = EvictionReason.LOWEST_VALUE
        while (candidate := self._ordinary.pop()) is not None or self._end_protections():
            if candidate is None:
                continue  # a protection ended just now, so there are ordinary candidates again
            if not self._is_protected(candidate.prefix.tenant):
                return candidate, reason
            reason = EvictionReason.OVER_FAIR_SHARE
            self._set_aside(candidate)
        if any(self._return_to_ordinary(set_aside) for set_aside in self._protected.values()):
            candidate = self._ordinary.pop()
        else:
            candidate = self._retained.pop()
        assert candidate is not None, "evict_block of a tier without evictable blocks"
        return candidate, EvictionReason.LAST_RESORT

    # Protection: tenants below their fair share

    def _is_protected(self, tenant: str) -> bool:
        if len(self._tenants) == 1:
            return False
        max_blocks = PROTECTED_SHARE * len(self._entries) / len(self._tenants)
        return self._tenants[tenant] <= max_blocks and self.registry.idle_seconds(tenant) < PROTECTION_SECONDS

    def _set_aside(self, candidate: EvictionCandidate) -> None:
        tenant = candidate.prefix.tenant
        queue = self._protected.setdefault(tenant, deque())
        queue.append(candidate)
        if len(queue) > 2 * self._tenants[tenant] + 64:  # most are cancelled
            self._protected[tenant] = deque(candidate for candidate in queue if not candidate.is_cancelled)

    def _end_protections(self) -> int:
        """Move the candidates of tenants that are no longer protected to the ordinary queue. Return how many moved."""
        tenants = [tenant for tenant in self._protected if not self._is_protected(tenant)]
        return sum(self._return_to_ordinary(self._protected.pop(tenant)) for tenant in tenants)

    def _return_to_ordinary(self, set_aside: deque[EvictionCandidate], limit: int | None = None) -> int:
        """Move up to `limit` candidates, the first set aside first. Return how many moved."""
        count = 0
        while set_aside and (limit is None or count < limit):
            candidate = set_aside.popleft()
            if not candidate.is_cancelled:
                self._ordinary.push(candidate)
                count += 1
        return count

    # Retention: blocks that requests asked to keep

    def _schedule_expiry(self, prefix: Prefix) -> None:
        heapq.heappush(self._expiries, (self._retained_until(prefix), prefix.block_hash))
        if len(self._expiries) > 2 * len(self._retained_hashes) + 64:  # most are outdated
            retained = [self._entries[block_hash].prefix for block_hash in self._retained_hashes]
            self._expiries = [(self._retained_until(prefix), prefix.block_hash) for prefix in retained]
            heapq.heapify(self._expiries)

    def _retained_until(self, prefix: Prefix) -> float:
        """The end of the claim in force; 0 if there is none."""
        return prefix.claims.in_force(self.registry.now)[1]

    def _end_expired_retentions(self) -> None:
        while self._expiries and self._expiries[0][0] <= self.registry.now:
            block_hash = heapq.heappop(self._expiries)[1]
            if block_hash not in self._retained_hashes:
                continue
            entry = self._entries[block_hash]
            if self._retained_until(entry.prefix):  # retained again since, or a lower claim lasts longer
                self._schedule_expiry(entry.prefix)
                self._requeue(entry)
            else:
                self._end_retention(entry)

    def _limit_retained(self) -> None:
        """End the retentions of lowest priority beyond the limit: of a leaf and its parents of no higher priority."""
        while len(self._retained_hashes) > self._max_retained and (candidate := self._retained.pop()) is not None:
            priority = candidate.prefix.claims.in_force(self.registry.now)[0]
            entry: _Entry | None = self._entries[candidate.prefix.block_hash]
            while entry is not None and entry.prefix.claims.in_force(self.registry.now)[0] <= priority:
                if entry.prefix.block_hash in self._retained_hashes:
                    self._end_retention(entry)
                if len(self._retained_hashes) <= self._max_retained:
                    break
                entry = self._entries.get(entry.prefix.parent_hash)

    def _end_retention(self, entry: _Entry) -> None:
        self._retained_hashes.discard(entry.prefix.block_hash)
        self._requeue(entry)

    def _requeue(self, entry: _Entry) -> None:
        """Move a leaf to the queue where it belongs now."""
        if entry.candidate is not None:
            self._cancel_candidate(entry)
            self._add_candidate(entry)
