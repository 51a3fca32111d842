"""Evictor: which evictable block of a tier is evicted next.

A block is *evictable* while no sequence and no copy uses it. Each tier (device pool, host pool, snapshots of states)
has an evictor. A block is evicted only after the blocks that follow it in the same prompt, because a suffix is useless
without its prefix. So only *leaves* are queued: evictable blocks without evictable children. A snapshot of states can
be used without the snapshots before it, so in Tier.STATE every block is a leaf. There are four queues. The evictor
empties them in this order:

    unwanted    a request said that it is not needed again (retention priority 0); oldest first
    ordinary    all others, in the order of an `EvictionPolicy`
    protected   ordinary blocks of tenants below their fair share of the tier; moved here when the policy picks them
    retained    a request asked to keep it; lowest priority first. At most RETAINED_SHARE of the tier is retained

The protection keeps a tenant that floods the cache from evicting the prefixes of all other tenants.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, TypeVar

from coatcheck.workers.core.cache_reasons import EvictionMark, EvictionReason, Tier
from coatcheck.workers.kv.eviction_policy import CandidateHeap, EvictionCandidate, EvictionPolicy
from coatcheck.workers.kv.prefix_registry import PrefixBlock, PrefixRegistry

# A tenant is protected while it has at most PROTECTED_SHARE of an equal share of the evictable blocks, and has made a
# request within the last PROTECTION_SECONDS.
PROTECTED_SHARE: Final = 0.5
PROTECTION_SECONDS: Final = 600.0
# The share of a tier's blocks that requests can retain. Beyond it the lowest priorities become ordinary.
RETAINED_SHARE: Final = 0.25
# `evict_block` looks for ended protections and retentions this often, and whenever no ordinary block is left.
_REFRESH_SECONDS: Final = 1.0

T = TypeVar("T")


class Evictor:
    """The evictable blocks of a tier of `capacity` blocks.

    With n evictable blocks, an operation takes O(log n), amortised. Every _REFRESH_SECONDS `evict_block` also scans the
    protected and the retained blocks.
    """

    def __init__(
        self, registry: PrefixRegistry, policy: EvictionPolicy, capacity: int, tier: Tier = Tier.DEVICE
    ) -> None:
        self.registry = registry
        self.num_evictions: Counter[EvictionReason] = Counter()
        self._tier = tier
        self._max_retained = int(capacity * RETAINED_SHARE)
        self._candidates: dict[bytes, EvictionCandidate] = {}  # by block hash; queued only while they are leaves
        self._num_added = 0
        self._num_children: Counter[bytes] = Counter()  # evictable ones, by the parent's hash
        self._num_blocks_of: Counter[str] = Counter()  # by tenant
        self._unwanted = CandidateHeap()
        self._ordinary = policy
        self._protected: deque[EvictionCandidate] = deque()
        self._retained = CandidateHeap()
        self._claims: dict[bytes, tuple[int, float]] = {}  # (priority, until) of every retained block, leaf or not
        self._next_expiry = math.inf  # no claim ends earlier
        self._refreshed_at = 0.0

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, prefix: PrefixBlock) -> bool:
        candidate = self._candidates.get(prefix.block_hash)
        return candidate is not None and candidate.prefix is prefix

    def add_block(self, prefix: PrefixBlock) -> None:
        """Make a block evictable. Add the blocks of a sequence deepest first."""
        assert prefix.block_hash not in self._candidates, "added twice"
        self._num_added += 1
        candidate = self._candidates[prefix.block_hash] = EvictionCandidate(prefix, self._num_added)
        self._num_blocks_of[prefix.tenant] += 1
        self._set_claim(prefix)
        if parent_hash := self._parent_hash(prefix):
            self._num_children[parent_hash] += 1
            if (parent := self._candidates.get(parent_hash)) is not None:
                parent.is_queued = False
        if prefix.block_hash not in self._num_children:
            self._queue_leaf(candidate)

    def remove_block(self, prefix: PrefixBlock) -> None:
        """Remove a block that is in use again, or evicted."""
        self._candidates.pop(prefix.block_hash).is_queued = False
        self._claims.pop(prefix.block_hash, None)
        _decrement(self._num_blocks_of, prefix.tenant)
        if parent_hash := self._parent_hash(prefix):
            is_leaf = not _decrement(self._num_children, parent_hash)
            if is_leaf and (parent := self._candidates.get(parent_hash)) is not None:
                self._queue_leaf(parent)

    def requeue_block(self, prefix: PrefixBlock) -> None:
        """Queue a block as just used and with its present retention claims. No effect if it is not evictable."""
        if prefix in self:
            self.remove_block(prefix)
            self.add_block(prefix)

    def evict_block(self) -> PrefixBlock:
        """Remove and return the block to evict next. There must be an evictable block."""
        now = self.registry.now
        if now >= self._refreshed_at + _REFRESH_SECONDS:
            self._refreshed_at = now
            self._end_protections()
            self._end_expired_retentions()
        self._limit_retained()
        prefix, reason = self._pop_candidate()
        self.num_evictions[reason] += 1
        self.remove_block(prefix)
        prefix.eviction = EvictionMark(now, self._tier, reason)
        return prefix

    def check(self, evictable: Iterable[PrefixBlock]) -> None:
        """Raises AssertionError unless the evictor has exactly the blocks `evictable`, and their leaves are queued."""
        expected = {prefix.block_hash: prefix for prefix in evictable}
        actual = {block_hash: candidate.prefix for block_hash, candidate in self._candidates.items()}
        assert expected == actual, "other blocks"
        children = Counter(filter(None, map(self._parent_hash, expected.values())))
        assert children == self._num_children, "children miscounted"
        queued = {block_hash for block_hash, candidate in self._candidates.items() if candidate.is_queued}
        assert queued == expected.keys() - children.keys(), "a leaf is not queued, or a block with children is"
        tenants = Counter(prefix.tenant for prefix in expected.values())
        assert tenants == self._num_blocks_of, "tenants miscounted"
        assert self._claims.keys() <= expected.keys(), "a retained block is not here"
        assert all(self._next_expiry <= until for _, until in self._claims.values()), "a retention never ends"

    def _parent_hash(self, prefix: PrefixBlock) -> bytes:
        """The hash of the block that is evicted only after `prefix`; b"" if there is none."""
        return b"" if self._tier is Tier.STATE else prefix.parent_hash

    def _pop_candidate(self) -> tuple[PrefixBlock, EvictionReason]:
        while (candidate := self._unwanted.pop()) is not None:
            if candidate.prefix.claims.is_unwanted(self.registry.now):
                return candidate.prefix, EvictionReason.UNWANTED
            self._queue_leaf(candidate)  # a later request asked for it, so it is no longer unwanted
        reason = EvictionReason.LOWEST_VALUE
        while (candidate := self._ordinary.pop()) or self._end_expired_retentions() or self._end_protections():
            if candidate is None:  # the condition has just queued blocks as ordinary or unwanted
                if (candidate := self._unwanted.pop()) is not None:
                    return candidate.prefix, EvictionReason.UNWANTED
                continue
            if not self._is_protected(candidate.prefix.tenant):
                return candidate.prefix, reason
            reason = EvictionReason.OVER_FAIR_SHARE
            self._protected.append(candidate)
        while self._protected:
            if (candidate := self._protected.popleft()).is_queued:
                return candidate.prefix, EvictionReason.LAST_RESORT
        candidate = self._retained.pop()
        assert candidate is not None, "evict_block of a tier without evictable blocks"
        return candidate.prefix, EvictionReason.LAST_RESORT

    def _queue_leaf(self, leaf: EvictionCandidate) -> None:
        """Put a leaf into the queue where it belongs now."""
        prefix = leaf.prefix
        leaf.is_queued = False  # another queue may still hold it
        candidate = self._candidates[prefix.block_hash] = EvictionCandidate(prefix, leaf.order, is_queued=True)
        if (claim := self._claims.get(prefix.block_hash)) is not None:
            self._retained.push(candidate, claim)
        elif prefix.claims.is_unwanted(self.registry.now):
            self._unwanted.push(candidate)
        else:
            self._ordinary.push(candidate)

    def _is_protected(self, tenant: str) -> bool:
        if len(self._num_blocks_of) == 1:
            return False
        max_blocks = PROTECTED_SHARE * len(self._candidates) / len(self._num_blocks_of)
        return self._num_blocks_of[tenant] <= max_blocks and self.registry.idle_seconds(tenant) < PROTECTION_SECONDS

    def _end_protections(self) -> bool:
        """If any candidate in `_protected` is no longer protected, move all of them to `_ordinary`, and return True.
        The others return to `_protected` when the policy picks them."""
        self._protected = deque(candidate for candidate in self._protected if candidate.is_queued)
        if all(self._is_protected(candidate.prefix.tenant) for candidate in self._protected):
            return False
        while self._protected:
            self._ordinary.push(self._protected.popleft())
        return True

    def _set_claim(self, prefix: PrefixBlock) -> None:
        """Record the retention claim in force, if there is one."""
        claim = prefix.claims.in_force(self.registry.now)
        self._claims.pop(prefix.block_hash, None)
        if claim[0]:
            self._claims[prefix.block_hash] = claim
            self._next_expiry = min(self._next_expiry, claim[1])

    def _end_expired_retentions(self) -> bool:
        """Replace or end the retention claims that have expired, and queue their leaves again. Return whether any had
        expired."""
        if self.registry.now < self._next_expiry:
            return False
        expired = [block_hash for block_hash, (_, until) in self._claims.items() if until <= self.registry.now]
        for block_hash in expired:
            candidate = self._candidates[block_hash]
            self._set_claim(candidate.prefix)  # a lower claim may last longer
            if candidate.is_queued:
                self._queue_leaf(candidate)
        self._next_expiry = min((until for _, until in self._claims.values()), default=math.inf)
        return bool(expired)

    def _limit_retained(self) -> None:
        """While more blocks are retained than the limit allows, end the retention of the leaf with the lowest priority,
        and of its ancestors up to one with a higher priority."""
        while len(self._claims) > self._max_retained and (leaf := self._retained.pop()) is not None:
            priority, _ = self._claims[leaf.prefix.block_hash]
            candidate: EvictionCandidate | None = leaf
            while candidate is not None and len(self._claims) > self._max_retained:
                block_hash, parent_hash = candidate.prefix.block_hash, self._parent_hash(candidate.prefix)
                if self._claims.get(block_hash, (0, 0.0))[0] > priority:
                    break
                self._claims.pop(block_hash, None)
                candidate = self._candidates.get(parent_hash)
            self._queue_leaf(leaf)


def _decrement(counts: Counter[T], key: T) -> int:
    """Subtract 1 and return the new count. Counts of 0 are dropped."""
    counts[key] -= 1
    return counts[key] or counts.pop(key)
