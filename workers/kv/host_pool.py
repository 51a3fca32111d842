"""HostPool: which prefix blocks lie in host memory, in which slot, and which of them a copy is under way to or from.

Slots are numbers here, the same on every rank. A slot is *free*, *demoting* (a block is on its way into it; it may
already be read, since copies of one slot run in order), *held* (on every rank, so that routers may count on it), or
*broken* (its bytes were not what had been put there; it is free again when nobody reads it any more). A slot that is
being read is *pinned* and stays. It does not know device blocks, bytes, nor when copying pays.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coatcheck.workers.core.cache_reasons import EvictionReason, Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Eviction
from coatcheck.workers.kv.eviction_policy import LeastRecentlyUsed
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """Slots by state, and what has happened since the start."""

    total: int = 0
    held: int = 0
    demoting: int = 0
    free: int = 0
    demotions: int = 0
    restores: int = 0
    integrity_failures: int = 0
    evictions: Mapping[EvictionReason, int] = field(default_factory=dict)


class HostPool:
    """Slots 0 to num_slots - 1; `eviction` says which held one makes room."""

    def __init__(self, num_slots: int, eviction: Eviction | None = None) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._names: list[Prefix | None] = [None] * num_slots
        self._by_hash: dict[bytes, int] = {}
        self._demoting: set[int] = set()
        self._broken: set[int] = set()
        self._pins: Counter[int] = Counter()
        if eviction is None:
            eviction = Eviction(PrefixRegistry(num_slots), LeastRecentlyUsed(), num_slots, Tier.HOST)
        self._cold = eviction
        self._events: list[KvEvent] = []
        self._demotions = self._restores = self._failures = 0

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a restore of this block may be asked for."""
        return block_hash in self._by_hash

    def begin_demotion(self, prefix: Prefix) -> int | None:
        """A slot for a block that is not here yet, or None when every slot is in use by a copy."""
        assert prefix.block_hash not in self._by_hash, "the block is here already"
        slot = self._take()
        if slot is not None:
            self._names[slot] = prefix
            self._by_hash[prefix.block_hash] = slot
            self._demoting.add(slot)
        return slot

    def end_demotion(self, slot: int) -> None:
        """Every rank has its part of the block: from here on it is held."""
        self._demoting.remove(slot)
        self._demotions += 1
        name = self._names[slot]
        if name is not None:
            self._events.append(KvEvent(True, name.block_hash, name.parent_hash, Tier.HOST))
        self._settle(slot)

    def begin_restore(self, block_hash: bytes) -> int:
        """The slot of a block that is here; it stays until `end_restore`."""
        slot = self._by_hash[block_hash]
        name = self._names[slot]
        assert name is not None
        if name in self._cold:
            self._cold.remove(name)
        self._pins[slot] += 1
        return slot

    def end_restore(self, slot: int, *, intact: bool | None) -> None:
        """The slot was read on every rank (None: it was not read after all). What is not intact is here no more."""
        assert self._pins[slot] > 0, f"slot {slot} is read by nobody"
        self._pins[slot] -= 1
        if intact is not None:
            self._restores += 1
        if intact is False:
            self._failures += 1
            self._break(slot)
        self._settle(slot)

    def touch(self, block_hash: bytes) -> None:
        """The block was wanted again, though not from here; or something else is asked of it."""
        name = self._names[self._by_hash[block_hash]]
        if name is not None and name in self._cold:
            self._cold.remove(name)
            self._cold.insert(name)

    def drain_events(self) -> list[KvEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[KvEvent]:
        """Every block held."""
        return [
            KvEvent(True, name.block_hash, name.parent_hash, Tier.HOST)
            for slot in self._by_hash.values()
            if slot not in self._demoting and (name := self._names[slot]) is not None
        ]

    def stats(self) -> HostPoolStats:
        """Counts as of now."""
        return HostPoolStats(
            total=self.num_slots,
            held=len(self._by_hash) - sum(self._names[slot] is not None for slot in self._demoting),
            demoting=len(self._demoting),
            free=len(self._free),
            demotions=self._demotions,
            restores=self._restores,
            integrity_failures=self._failures,
            evictions=dict(self._cold.by_reason),
        )

    def check(self) -> None:
        """Raises AssertionError unless every slot is in exactly one state."""
        free, cold = set(self._free), set[int]()
        assert len(free) == len(self._free), "a slot is free twice"
        for slot, name in enumerate(self._names):
            pins, demoting, broken = self._pins[slot], slot in self._demoting, slot in self._broken
            assert (slot in free) == (name is None and not broken), f"slot {slot}: free and in use, or lost"
            assert not (broken and name), f"slot {slot} is broken but named"
            assert not broken or pins or demoting, f"slot {slot} is broken and used by nobody, but not free"
            assert not demoting or name or broken, f"slot {slot} is demoting nothing"
            if name is not None:
                assert self._by_hash[name.block_hash] == slot, f"slot {slot}: its name leads elsewhere"
                evictable = not pins and not demoting
                assert (name in self._cold) == evictable, f"slot {slot}: may it go or not?"
                cold |= {slot} if evictable else set()
        assert len(cold) == len(self._cold), "the eviction has blocks that are not here"
        assert len(self._by_hash) == sum(name is not None for name in self._names), "a hash names no slot"

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not len(self._cold):
            return None
        name = self._cold.pop()
        slot = self._by_hash.pop(name.block_hash)
        self._names[slot] = None
        self._events.append(KvEvent(False, name.block_hash, b"", Tier.HOST))
        return slot

    def _break(self, slot: int) -> None:
        name = self._names[slot]
        if name is None:
            return  # another restore of it has found out before
        name.broken = True
        self._names[slot] = None
        del self._by_hash[name.block_hash]
        self._broken.add(slot)
        if slot not in self._demoting:
            self._events.append(KvEvent(False, name.block_hash, b"", Tier.HOST))

    def _settle(self, slot: int) -> None:
        """After a copy: the slot may be evicted, or is free, if that was the last one."""
        if self._pins[slot] or slot in self._demoting:
            return
        del self._pins[slot]
        name = self._names[slot]
        if name is not None:
            self._cold.insert(name)
        elif slot in self._broken:
            self._broken.remove(slot)
            self._free.append(slot)
