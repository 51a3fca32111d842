"""HostPool: which prefix blocks are in host memory, in which slot, and which slots a copy reads or writes.

Slots have the same numbers on every rank. A slot is

    free
    demoting    a block is being copied into the slot. Restores may be queued: copies of one slot run in order
    held        every rank has its part of the block, so routers are told
    corrupt     the checksum did not match; the slot becomes free when the last restore that reads it has ended

A slot that a restore reads is *pinned* and cannot be evicted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coatcheck.workers.core.cache_reasons import EvictionReason, Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import LRUPolicy
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """Slots by state, and counts since the start."""

    total: int = 0
    held: int = 0
    demoting: int = 0
    free: int = 0
    demotions: int = 0
    restores: int = 0
    integrity_failures: int = 0
    evictions: Mapping[EvictionReason, int] = field(default_factory=dict)


class HostPool:
    """Slots 0 to `num_slots` - 1. `evictor`: by default one with LRU order."""

    def __init__(self, num_slots: int, evictor: Evictor | None = None) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._prefixes: list[Prefix | None] = [None] * num_slots
        self._by_hash: dict[bytes, int] = {}
        self._demoting: set[int] = set()
        self._corrupt: set[int] = set()
        self._pins: Counter[int] = Counter()
        if evictor is None:
            evictor = Evictor(PrefixRegistry(num_slots), LRUPolicy(), num_slots, Tier.HOST)
        self._evictor = evictor
        self._events: list[KvEvent] = []
        self._num_demotions = self._num_restores = self._num_failures = 0

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block can be restored."""
        return block_hash in self._by_hash

    def begin_demotion(self, prefix: Prefix) -> int | None:
        """Reserve a slot for a block that the pool lacks. Return None if copies use every slot."""
        assert prefix.block_hash not in self._by_hash, "the block is here already"
        slot = self._allocate_slot()
        if slot is not None:
            self._prefixes[slot] = prefix
            self._by_hash[prefix.block_hash] = slot
            self._demoting.add(slot)
        return slot

    def end_demotion(self, slot: int) -> None:
        """Mark the slot as held, because every rank has copied its part of the block."""
        self._demoting.remove(slot)
        self._num_demotions += 1
        prefix = self._prefixes[slot]
        if prefix is not None:
            self._events.append(KvEvent(True, prefix.block_hash, prefix.parent_hash, Tier.HOST))
        self._release_slot(slot)

    def begin_restore(self, block_hash: bytes) -> int:
        """Pin and return the slot of a block that the pool has, until `end_restore`."""
        slot = self._by_hash[block_hash]
        prefix = self._prefixes[slot]
        assert prefix is not None
        if prefix in self._evictor:
            self._evictor.remove_block(prefix)
        self._pins[slot] += 1
        return slot

    def end_restore(self, slot: int, *, is_intact: bool | None) -> None:
        """Unpin the slot. `is_intact`: whether the checksums matched on every rank; None if no rank read the slot."""
        assert self._pins[slot] > 0, f"no restore reads slot {slot}"
        self._pins[slot] -= 1
        if is_intact is not None:
            self._num_restores += 1
        if is_intact is False:
            self._num_failures += 1
            self._discard_block(slot)
        self._release_slot(slot)

    def requeue_block(self, block_hash: bytes) -> None:
        """Queue a block that the pool has for eviction again, as just used and with its present retention claims."""
        prefix = self._prefixes[self._by_hash[block_hash]]
        if prefix is not None and prefix in self._evictor:
            self._evictor.remove_block(prefix)
            self._evictor.add_block(prefix)

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[KvEvent]:
        """A stored event for each block held."""
        return [
            KvEvent(True, prefix.block_hash, prefix.parent_hash, Tier.HOST)
            for slot in self._by_hash.values()
            if slot not in self._demoting and (prefix := self._prefixes[slot]) is not None
        ]

    def stats(self) -> HostPoolStats:
        return HostPoolStats(
            total=self.num_slots,
            held=len(self._by_hash) - sum(self._prefixes[slot] is not None for slot in self._demoting),
            demoting=len(self._demoting),
            free=len(self._free),
            demotions=self._num_demotions,
            restores=self._num_restores,
            integrity_failures=self._num_failures,
            evictions=dict(self._evictor.num_evictions),
        )

    def check(self) -> None:
        """Raise AssertionError unless every slot is in one state."""
        free, evictable = set(self._free), set[int]()
        assert len(free) == len(self._free), "a slot is free twice"
        for slot, prefix in enumerate(self._prefixes):
            pins, is_demoting, is_corrupt = self._pins[slot], slot in self._demoting, slot in self._corrupt
            assert (slot in free) == (prefix is None and not is_corrupt), f"slot {slot} is free and in use, or lost"
            assert not (is_corrupt and prefix), f"slot {slot} is corrupt and has a prefix"
            assert not is_corrupt or pins or is_demoting, f"slot {slot} is corrupt and used by no copy, but not free"
            assert not is_demoting or prefix or is_corrupt, f"slot {slot} demotes no block"
            if prefix is not None:
                assert self._by_hash[prefix.block_hash] == slot, f"slot {slot}: found under no hash"
                is_evictable = not pins and not is_demoting
                assert (prefix in self._evictor) == is_evictable, f"slot {slot}: the evictor is wrong about it"
                evictable |= {slot} if is_evictable else set()
        assert len(evictable) == len(self._evictor), "the evictor has blocks that are not here"
        assert len(self._by_hash) == sum(prefix is not None for prefix in self._prefixes), "a hash has no slot"

    def _allocate_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not len(self._evictor):
            return None
        prefix = self._evictor.evict_block()
        slot = self._by_hash.pop(prefix.block_hash)
        self._prefixes[slot] = None
        self._events.append(KvEvent(False, prefix.block_hash, b"", Tier.HOST))
        return slot

    def _discard_block(self, slot: int) -> None:
        prefix = self._prefixes[slot]
        if prefix is None:
            return  # another restore of the slot discarded it before
        prefix.is_corrupt = True
        self._prefixes[slot] = None
        del self._by_hash[prefix.block_hash]
        self._corrupt.add(slot)
        if slot not in self._demoting:
            self._events.append(KvEvent(False, prefix.block_hash, b"", Tier.HOST))

    def _release_slot(self, slot: int) -> None:
        """Make a slot that no copy uses any more evictable or free."""
        if self._pins[slot] or slot in self._demoting:
            return
        del self._pins[slot]
        prefix = self._prefixes[slot]
        if prefix is not None:
            self._evictor.add_block(prefix)
        elif slot in self._corrupt:
            self._corrupt.remove(slot)
            self._free.append(slot)
