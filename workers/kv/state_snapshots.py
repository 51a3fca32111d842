"""StateSnapshots: copies of a model's recurrent states at the ends of prefix blocks. A prompt can start at a snapshot.

Each rank has slots for snapshots after the slots of running sequences. A snapshot is

    planned   a plan copies a sequence's states to the slot. The block that ends there is not registered yet
    rolling   the one snapshot of a sequence that decodes. The sequence's next snapshot overwrites it. It becomes held
              when the sequence gives up its blocks
    held      the block is registered, so prompts can start after it. Dropped when the block's KV leaves the device

Ranks execute plans in order. In a plan they restore states before the forward pass and save them after it. So a held
snapshot can be evicted and its slot reused at once, even if a plan in flight, or the same plan, restores it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import KvEvent, StateSnapshotStats
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.prefix_registry import PrefixBlock


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A held snapshot. `prefix`: the block that ends where the snapshot was taken."""

    slot: int
    prefix: PrefixBlock


class StateSnapshots:
    """`slots`: the ranks' slots for snapshots. `evictor`: has exactly the blocks of the held snapshots."""

    def __init__(self, slots: range, evictor: Evictor) -> None:
        self.num_saves = self.num_restores = 0
        self.evictor = evictor
        self._slots = slots
        self._free = list(reversed(slots))
        self._held: dict[bytes, _Snapshot] = {}  # by block hash
        self._planned: dict[Sequence, dict[int, int]] = {}  # sequence -> the block's index in it -> slot
        self._rolling: dict[Sequence, tuple[int, int]] = {}  # (slot, the block's index in the sequence)
        self._events: list[KvEvent] = []

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a prompt can start after this block."""
        return block_hash in self._held

    def __len__(self) -> int:
        return len(self._held)

    def stats(self) -> StateSnapshotStats:
        """The slots and held snapshots now, and the counts since the start."""
        return StateSnapshotStats(
            slots=len(self._slots),
            held=len(self._held),
            saves=self.num_saves,
            restores=self.num_restores,
            evictions=sum(self.evictor.num_evictions.values()),
        )

    def count_restorable_blocks(self, hashes: list[bytes]) -> int:
        """The number of leading blocks of the chain `hashes` up to its last held snapshot; 0 if there is none."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._held), 0)

    def plan_restore(self, block_hash: bytes) -> int:
        """Return the slot of a held snapshot, and make the snapshot the most recently used one."""
        self.requeue_block(block_hash)
        self.num_restores += 1
        return self._held[block_hash].slot

    def requeue_block(self, block_hash: bytes) -> None:
        """Queue the block's snapshot for eviction again, as just used and with the block's present retention claims. No
        effect if no snapshot of the block is held."""
        if (snapshot := self._held.get(block_hash)) is not None:
            self.evictor.requeue_block(snapshot.prefix)

    def plan_prompt_save(self, sequence: Sequence, index: int) -> int | None:
        """Reserve a slot for the sequence's states after its block `index`. None if no slot is free and no snapshot is
        held, so that none can be evicted."""
        if (slot := self._take_slot()) is not None:
            self._planned.setdefault(sequence, {})[index] = slot
        return slot

    def plan_rolling_save(self, sequence: Sequence, index: int) -> int | None:
        """Reserve the slot of the sequence's rolling snapshot for its states after its block `index`. None if the
        sequence has no slot and can get none. Rolling snapshots take at most half of the slots, so that prompts have
        the others."""
        slot, _ = self._rolling.get(sequence, (None, 0))
        if slot is not None:
            self.num_saves += 1
        elif 2 * (len(self._rolling) + 1) > len(self._slots) or (slot := self._take_slot()) is None:
            return None
        self._rolling[sequence] = slot, index
        return slot

    def record_registered(self, sequence: Sequence, index: int, block_hash: bytes) -> None:
        """Hold the snapshot planned after the sequence's block `index`, if there is one: the block is now
        registered."""
        planned = self._planned.get(sequence, {})
        if (slot := planned.pop(index, None)) is None:
            return
        if not planned:
            del self._planned[sequence]
        self._hold(block_hash, slot)

    def end_sequence(self, sequence: Sequence) -> None:
        """Drop the planned snapshots of a sequence that gives up its blocks. Hold its rolling snapshot if the block
        there is registered, else drop it too."""
        self._free.extend(self._planned.pop(sequence, {}).values())
        if (rolling := self._rolling.pop(sequence, None)) is None:
            return
        slot, index = rolling
        if index < sequence.num_registered:
            self._hold(sequence.block_hashes[index], slot)
        else:  # the plan that copies the states there is in flight
            self._free.append(slot)

    def drop_block(self, block_hash: bytes) -> None:
        """Drop the snapshot of a block whose KV leaves the device. No effect if none is held."""
        if (snapshot := self._held.get(block_hash)) is not None:
            self.evictor.remove_block(snapshot.prefix)
            self._remove_held(block_hash)

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def prefix_hashes(self) -> list[bytes]:
        """The hash of each block with a held snapshot."""
        return list(self._held)

    def stored_events(self, hashes: Iterable[bytes]) -> list[KvEvent]:
        """A stored event for each of these blocks whose snapshot is held."""
        return [KvEvent(True, block_hash, b"", Tier.STATE) for block_hash in hashes if block_hash in self._held]

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless each slot has one purpose, and planned and rolling snapshots are of `running`
        sequences."""
        planned = [slot for slots in self._planned.values() for slot in slots.values()]
        rolling = [slot for slot, _ in self._rolling.values()]
        held = [snapshot.slot for snapshot in self._held.values()]
        assert sorted([*self._free, *planned, *rolling, *held]) == list(self._slots), "slots lost or doubled"
        assert 2 * len(rolling) <= len(self._slots), "too many rolling snapshots"
        self.evictor.check(snapshot.prefix for snapshot in self._held.values())
        for block_hash, snapshot in self._held.items():
            assert snapshot.prefix.block_hash == block_hash, "a snapshot of another block"
        assert {*self._planned, *self._rolling} <= set(running), "a snapshot of a sequence that does not run"
        for sequence, slots in self._planned.items():
            assert slots, "a sequence without planned snapshots is listed"
            assert min(slots) >= sequence.num_registered, "a snapshot is planned at a block that is registered already"

    def _take_slot(self) -> int | None:
        """A free slot, or the slot of an evicted snapshot. None if no slot is free and no snapshot is held."""
        if not self._free:
            if not self._held:
                return None
            self._remove_held(self.evictor.evict_block().block_hash)
        self.num_saves += 1
        return self._free.pop()

    def _hold(self, block_hash: bytes, slot: int) -> None:
        """Hold the block's snapshot in `slot`, or free `slot` if the block has a held snapshot. The block's snapshot
        becomes the most recently used one."""
        if block_hash in self._held:
            self.requeue_block(block_hash)
            self._free.append(slot)
            return
        prefix = self.evictor.registry.find_block(block_hash)
        assert prefix is not None, "the block of a snapshot is not registered"
        self._held[block_hash] = _Snapshot(slot, prefix)
        self.evictor.add_block(prefix)
        self._events.append(KvEvent(True, block_hash, b"", Tier.STATE))

    def _remove_held(self, block_hash: bytes) -> None:
        self._free.append(self._held.pop(block_hash).slot)
        self._events.append(KvEvent(False, block_hash, b"", Tier.STATE))
