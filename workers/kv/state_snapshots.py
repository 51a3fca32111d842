"""StateSnapshots: copies of a model's recurrent states at the ends of prefix blocks.

Each rank has slots for snapshots behind the slots of running sequences. A snapshot is

    planned   a plan copies a sequence's states to the slot, and the block at whose end they stand is not registered yet
    latest    of a sequence that decodes; its next one replaces it. Held once the sequence ends or is preempted
    held      the block is registered: a prompt with this prefix can start behind the block

Ranks execute plans in order, restores before the forward pass and saves behind it. So a held snapshot can be evicted
and its slot given to another block at once, even if a plan in flight, or the same plan, restores it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.sequence import Sequence as Choice
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.prefix_registry import PrefixBlock


@dataclass(frozen=True, slots=True)
class _Held:
    slot: int
    prefix: PrefixBlock


class StateSnapshots:
    """`slots`: those of the ranks for snapshots. `evictor`: which held snapshot is evicted next; it has no others."""

    def __init__(self, slots: range, evictor: Evictor) -> None:
        self.num_saves = self.num_restores = 0
        self.evictor = evictor
        self._slots = slots
        self._free = list(reversed(slots))
        self._held: dict[bytes, _Held] = {}  # by block hash
        self._planned: dict[Choice, dict[int, int]] = {}  # slot by the block's index in the sequence
        self._latest: dict[Choice, tuple[int, int]] = {}  # slot, and the block's index in the sequence
        self._events: list[KvEvent] = []

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a snapshot of the states at the block's end is held."""
        return block_hash in self._held

    def __len__(self) -> int:
        return len(self._held)

    def count_restorable(self, hashes: Sequence[bytes]) -> int:
        """The most leading blocks of the chain `hashes` at whose end a snapshot is held; 0 if there is none."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._held), 0)

    def plan_restore(self, block_hash: bytes) -> int:
        """The slot of a held snapshot, which becomes the most recently used one."""
        self.requeue_block(block_hash)
        self.num_restores += 1
        return self._held[block_hash].slot

    def requeue_block(self, block_hash: bytes) -> None:
        """Queue the block's snapshot for eviction again, as just used and with the block's present retention claims. No
        effect without one."""
        if (held := self._held.get(block_hash)) is not None:
            self.evictor.requeue_block(held.prefix)

    def plan_save(self, sequence: Choice, index: int) -> int | None:
        """A slot for the states of `sequence` at the end of its block `index`. None if all slots are planned."""
        if (slot := self._take_slot()) is not None:
            self._planned.setdefault(sequence, {})[index] = slot
        return slot

    def replace_latest(self, sequence: Choice, index: int) -> int | None:
        """The slot of the sequence's latest snapshot, for its states at the end of block `index`. None if half of all
        slots have latest snapshots of other sequences: the rest is for prompts."""
        slot, _ = self._latest.get(sequence, (None, 0))
        if slot is not None:
            self.num_saves += 1
        elif 2 * len(self._latest) + 2 > len(self._slots) or (slot := self._take_slot()) is None:
            return None
        self._latest[sequence] = slot, index
        return slot

    def record_registered(self, sequence: Choice, index: int, block_hash: bytes) -> None:
        """Hold the snapshot that was planned for block `index` of the sequence, if there is one and none is held."""
        planned = self._planned.get(sequence, {})
        if (slot := planned.pop(index, None)) is None:
            return
        if not planned:
            del self._planned[sequence]
        self._hold(block_hash, slot)

    def end_sequence(self, sequence: Choice) -> None:
        """Of a sequence that gives up its blocks, hold the latest snapshot if its block is registered. Free the slots
        of the others that are not held."""
        self._free.extend(self._planned.pop(sequence, {}).values())
        if (latest := self._latest.pop(sequence, None)) is None:
            return
        slot, index = latest
        if index < sequence.num_registered:
            self._hold(sequence.block_hashes[index], slot)
        else:
            self._free.append(slot)

    def drop_blocks(self, hashes: Iterable[bytes]) -> None:
        """Drop the snapshots of blocks whose KV has left the device."""
        for block_hash in hashes:
            if (held := self._held.get(block_hash)) is not None:
                self.evictor.remove_block(held.prefix)
                self._forget(block_hash)

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def prefix_hashes(self) -> list[bytes]:
        """The hash of each block with a snapshot."""
        return list(self._held)

    def stored_events(self, hashes: Iterable[bytes]) -> list[KvEvent]:
        """A stored event for each of these blocks whose snapshot is held."""
        return [KvEvent(True, block_hash, b"", Tier.STATE) for block_hash in hashes if block_hash in self._held]

    def check(self, running: Iterable[Choice]) -> None:
        """Raises AssertionError unless each slot is in one state, and those that are not held are of `running`."""
        planned = [slot for slots in self._planned.values() for slot in slots.values()]
        planned += [slot for slot, _ in self._latest.values()]
        held = [one.slot for one in self._held.values()]
        assert sorted([*self._free, *planned, *held]) == list(self._slots), "slots lost or doubled"
        self.evictor.check(one.prefix for one in self._held.values())
        assert all(self._planned.values()), "a sequence without planned snapshots is listed"
        assert {*self._planned, *self._latest} <= set(running), "a snapshot is planned for a sequence that does not run"

    def _take_slot(self) -> int | None:
        """A slot to save states in. None if no slot is free and no snapshot is held."""
        if not self._free:
            if not self._held:
                return None
            self._forget(self.evictor.evict_block().block_hash)
        self.num_saves += 1
        return self._free.pop()

    def _hold(self, block_hash: bytes, slot: int) -> None:
        """Hold a snapshot, which becomes the most recently used one. If one of the block is held, free `slot`."""
        if block_hash in self._held:
            self.requeue_block(block_hash)
            self._free.append(slot)
            return
        prefix = self.evictor.registry.find_block(block_hash)
        assert prefix is not None, "the block of a snapshot is not registered"
        self._held[block_hash] = _Held(slot, prefix)
        self.evictor.add_block(prefix)
        self._events.append(KvEvent(True, block_hash, b"", Tier.STATE))

    def _forget(self, block_hash: bytes) -> None:
        self._free.append(self._held.pop(block_hash).slot)
        self._events.append(KvEvent(False, block_hash, b"", Tier.STATE))
