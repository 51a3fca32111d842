"""Eviction: which of a tier's cold blocks goes next.

Each tier owns one: it inserts a block's record when nobody holds the block any more, removes it when somebody does
again, and pops the next to go when it needs room. A block goes only after all that hang on it here (a suffix is worth
nothing without its prefix), so only *leaves* stand in line. There are four lines, emptied in this order:

    unwanted    leaves that will not be needed again, as a request has said (priority 0), oldest first
    ordinary    in the order of an `EvictionPolicy`: what is worth least, or was used longest ago, goes first
    sheltered   leaves of tenants that hold less than their fair share, set aside as their turn came
    retained    leaves that a request asked to keep, lowest priority first; at most a share of the tier

It does not know where blocks lie, nor what makes one worth more than another.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from coatcheck.workers.core.cache_reasons import EvictionMark, EvictionReason, Tier
from coatcheck.workers.kv.eviction_policy import EvictionPolicy, Leaf, LeafHeap, LeastRecentlyUsed
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry

# A tenant that asked for anything lately keeps this part of an equal share of what is cold.
SHELTERED_SHARE: Final = 0.5
SHELTER_SECONDS: Final = 600.0
# What requests may ask to be retained of a tier; beyond it they lose the lowest priority's claim.
RETAINED_SHARE: Final = 0.25


class Eviction:
    """The cold blocks of a tier of `capacity` blocks. Operations take O(log) of their number, amortised."""

    def __init__(self, book: PrefixRegistry, order: EvictionPolicy, capacity: int, tier: Tier = Tier.DEVICE) -> None:
        self.book = book
        self.by_reason: Counter[EvictionReason] = Counter()
        self._order = order
        self._tier = tier
        self._retainable = int(capacity * RETAINED_SHARE)
        self._cold: dict[bytes, Prefix] = {}
        self._stamps: dict[bytes, int] = {}
        self._inserted = 0
        self._children: Counter[bytes] = Counter()  # cold blocks that hang on this one
        self._leaves: dict[bytes, Leaf] = {}
        self._tenants: Counter[str] = Counter()  # cold blocks
        self._unwanted = LeastRecentlyUsed()
        self._sheltered: dict[str, deque[Leaf]] = {}
        self._exposed_at = 0.0
        self._retained: set[bytes] = set()
        self._kept = LeafHeap()  # retained leaves, by priority and until when
        self._expiries: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._cold)

    def __contains__(self, prefix: Prefix) -> bool:
        return self._cold.get(prefix.block_hash) is prefix

    def insert(self, prefix: Prefix) -> None:
        """It may go from now on; a sequence's blocks are given deepest first."""
        block_hash = prefix.block_hash
        assert block_hash not in self._cold, "inserted twice"
        self._cold[block_hash] = prefix
        self._inserted += 1
        self._stamps[block_hash] = self._inserted
        self._tenants[prefix.tenant] += 1
        if prefix.claims.in_force(self.book.now)[0]:
            self._retained.add(block_hash)
            self._schedule_expiry(prefix)
        if prefix.parent_hash:
            self._children[prefix.parent_hash] += 1
            if (parent := self._leaves.pop(prefix.parent_hash, None)) is not None:
                parent.void = True
        self._line_up(prefix)

    def remove(self, prefix: Prefix) -> None:
        """It may not go any more: it is held again, or gone."""
        block_hash = prefix.block_hash
        del self._cold[block_hash], self._stamps[block_hash]
        self._retained.discard(block_hash)
        self._tenants[prefix.tenant] -= 1
        if not self._tenants[prefix.tenant]:
            del self._tenants[prefix.tenant]
            self._sheltered.pop(prefix.tenant, None)
        if (leaf := self._leaves.pop(block_hash, None)) is not None:
            leaf.void = True
        if prefix.parent_hash:
            self._children[prefix.parent_hash] -= 1
            if not self._children[prefix.parent_hash]:
                del self._children[prefix.parent_hash]
                if (parent := self._cold.get(prefix.parent_hash)) is not None:
                    self._line_up(parent)

    def pop(self) -> Prefix:
        """Takes out the one to go next; there is at least one."""
        self._expire()
        self._cap_retained()
        if self.book.now >= self._exposed_at + 1:
            self._exposed_at = self.book.now
            self._expose()
        leaf, reason = self._next()
        self.by_reason[reason] += 1
        self.remove(leaf.prefix)
        leaf.prefix.evicted = EvictionMark(self.book.now, self._tier, reason)
        return leaf.prefix

    def check(self, held: Iterable[Prefix]) -> None:
        """Raises AssertionError unless exactly these blocks are cold and every leaf stands in line."""
        expected = {prefix.block_hash: prefix for prefix in held}
        assert expected == self._cold, "the eviction has other blocks than the tier"
        children = Counter(prefix.parent_hash for prefix in self._cold.values() if prefix.parent_hash)
        assert children == self._children, "children miscounted"
        leaves = {block_hash for block_hash in self._cold if block_hash not in children}
        assert leaves == set(self._leaves), "a leaf is not in line, or a block with children is"
        assert not any(leaf.void for leaf in self._leaves.values()), "a void leaf is in line"
        assert self._tenants == Counter(prefix.tenant for prefix in self._cold.values()), "tenants miscounted"
        assert self._retained <= set(self._cold), "a retained block is not here"
        assert self._retained <= {block_hash for _, block_hash in self._expiries}, "a retained block is so for ever"

    def _line_up(self, prefix: Prefix) -> None:
        if prefix.block_hash in self._children:
            return
        leaf = self._leaves[prefix.block_hash] = Leaf(prefix, self._stamps[prefix.block_hash])
        if prefix.block_hash in self._retained:
            self._kept.push(prefix.claims.in_force(self.book.now), leaf)
        elif prefix.claims.is_unwanted(self.book.now):
            self._unwanted.push(leaf)
        else:
            self._order.push(leaf)
        line = self._sheltered.get(prefix.tenant)
        if line and not self._is_sheltered(prefix.tenant):  # it has grown: the one set aside first is in line again
            self._put_back(line, 1)

    def _next(self) -> tuple[Leaf, EvictionReason]:
        while (leaf := self._unwanted.pop()) is not None:
            if leaf.prefix.claims.is_unwanted(self.book.now):
                return leaf, EvictionReason.UNWANTED
            self._line_up(leaf.prefix)  # asked for after all, though not from here; or that was long ago
        reason = EvictionReason.WORTH_LEAST
        while (next_leaf := self._order.pop()) is not None or self._expose():
            if next_leaf is None:
                continue
            if not self._is_sheltered(next_leaf.prefix.tenant):
                return next_leaf, reason
            reason = EvictionReason.OVER_SHARE
            self._set_aside(next_leaf)
        if any(self._put_back(line) for line in self._sheltered.values()):
            next_leaf = self._order.pop()  # whatever is not sheltered is retained
            assert next_leaf is not None
            return next_leaf, EvictionReason.NOTHING_ELSE
        if (leaf := self._kept.pop()) is not None:
            return leaf, EvictionReason.NOTHING_ELSE
        raise AssertionError("pop of an empty tier")

    def _set_aside(self, leaf: Leaf) -> None:
        tenant = leaf.prefix.tenant
        line = self._sheltered.setdefault(tenant, deque())
        line.append(leaf)
        if len(line) > 2 * self._tenants[tenant] + 64:  # most are void: its blocks are used again and again
            self._sheltered[tenant] = deque(leaf for leaf in line if not leaf.void)

    def _expose(self) -> int:
        """Puts tenants that are sheltered no longer in line again; how many leaves that makes."""
        exposed = [tenant for tenant in self._sheltered if not self._is_sheltered(tenant)]
        return sum(self._put_back(self._sheltered.pop(tenant)) for tenant in exposed)

    def _is_sheltered(self, tenant: str) -> bool:
        """Whether the tenant holds so little that others must give way."""
        if len(self._tenants) == 1:
            return False
        share = SHELTERED_SHARE * len(self._cold) / len(self._tenants)
        return self._tenants[tenant] <= share and self.book.idle_seconds(tenant) < SHELTER_SECONDS

    def _put_back(self, line: deque[Leaf], at_most: int | None = None) -> int:
        """How many of the leaves set aside stand in the ordinary line again."""
        count = 0
        while line and (at_most is None or count < at_most):
            leaf = line.popleft()
            if not leaf.void:
                self._order.push(leaf)
                count += 1
        return count

    def _schedule_expiry(self, prefix: Prefix) -> None:
        heapq.heappush(self._expiries, (self._retained_until(prefix), prefix.block_hash))
        if len(self._expiries) > 2 * len(self._retained) + 64:  # most are of earlier uses, or of blocks that are gone
            self._expiries = [(self._retained_until(self._cold[name]), name) for name in self._retained]
            heapq.heapify(self._expiries)

    def _retained_until(self, prefix: Prefix) -> float:
        """Until when the claim is that is in force now; 0 where none is any more."""
        return prefix.claims.in_force(self.book.now)[1]

    def _expire(self) -> None:
        while self._expiries and self._expiries[0][0] <= self.book.now:
            block_hash = heapq.heappop(self._expiries)[1]
            if block_hash not in self._retained:
                continue
            prefix = self._cold[block_hash]
            if self._retained_until(prefix):  # asked for anew meanwhile, or a lower claim lasts longer
                self._schedule_expiry(prefix)
            else:
                self._retained.discard(block_hash)
            self._line_up_anew(prefix)

    def _cap_retained(self) -> None:
        while len(self._retained) > self._retainable and (leaf := self._kept.pop()) is not None:
            prefix: Prefix | None = leaf.prefix
            priority = leaf.prefix.claims.in_force(self.book.now)[0]
            # With a leaf goes what it hangs on, before a leaf of higher priority does.
            while prefix is not None and prefix.claims.in_force(self.book.now)[0] <= priority:
                self._release(prefix)
                if len(self._retained) <= self._retainable:
                    break
                prefix = self._cold.get(prefix.parent_hash)

    def _release(self, prefix: Prefix) -> None:
        """A cold block is retained no longer."""
        if prefix.block_hash not in self._retained:
            return
        self._retained.discard(prefix.block_hash)
        self._line_up_anew(prefix)

    def _line_up_anew(self, prefix: Prefix) -> None:
        if (leaf := self._leaves.pop(prefix.block_hash, None)) is not None:
            leaf.void = True
            self._line_up(prefix)
