"""PrefixIndex: which group holds which KV blocks, exactly, by block hash and tier.

Each group sends events in order, and a snapshot in chunks between them. The first chunk of a snapshot removes the
group's blocks. Each chunk adds blocks that are held after the events before it, so a prefix matches as soon as its
chunk has come. After a new epoch or a gap the index has no blocks of a group until its next snapshot begins. Missing
blocks make requests slower, but false ones would make the router count on blocks that are not there. The index also
contains expected blocks: those of prompts that this router has sent, until their first output. The group's KV events
come before that output.

Each group has a slot, its index in the arrays of loads and matches. A set of groups is an int bitmask with one bit for
each group. At first this is the bit of its slot. When the blocks of a group that stays are forgotten, the group gets
another bit, because the old blocks keep the old bit until they are dropped. A block has three sets of groups (device,
host, expected), so looking up a few blocks of a prompt matches all groups at once. For groups whose model keeps states
(recurrent layers), StateLocations cuts the match to the block after which the prompt can start.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coatcheck.proto.stubs.worker_pb2 import TIER_STATE, KvEvent, KvEvents, SnapshotChunk
from coatcheck.router.routing.block_locations import BlockLocations, EventProblem
from coatcheck.router.routing.expected_blocks import ExpectedBlocks
from coatcheck.router.routing.hit_prediction import HitPrediction
from coatcheck.router.routing.prefix_match import PrefixMatches, match_chain
from coatcheck.router.routing.state_locations import StateLocations

IndexArray: TypeAlias = NDArray[np.intp]

_REMOVALS_PER_MESSAGE: Final = 1000  # blocks of groups that have left, or begin again


class EventOutcome(Enum):
    """What was done with a message of events or a chunk of a snapshot."""

    APPLIED = "applied"
    IGNORED = "ignored"  # repeated, of another epoch, or before the first snapshot
    SNAPSHOT_NEEDED = "snapshot needed"
    IMPOSSIBLE = "impossible"  # the group reports more blocks, or more snapshots of states, than it registered blocks


@dataclass(slots=True)
class _IndexedGroup:
    """One registered group. `next_sequence` is None until a snapshot begins. `is_complete`: the last chunk of a
    snapshot has come. `is_requested`: a snapshot was requested because of a gap, and has not begun."""

    slot: int
    bit: int
    epoch: str
    capacity: int  # blocks of both tiers; 0 if unknown
    block_size: int  # tokens; 0 if unknown
    keeps_states: bool
    next_sequence: int | None = None
    is_complete: bool = False
    is_requested: bool = False


class PrefixIndex:
    """One for a router, fed by all its GroupConnections."""

    def __init__(self) -> None:
        self.hit_prediction = HitPrediction()
        self.problems: Counter[EventProblem] = Counter()
        self.events = 0  # applied so far, those of snapshots too
        self._groups: dict[str, _IndexedGroup] = {}
        self._live = 0  # the set of all groups
        # Slots and bit numbers of all groups, if they differ for some group; else None.
        self._moved: tuple[IndexArray, IndexArray] | None = None
        self._locations = BlockLocations(self.problems)
        self.expected_blocks = ExpectedBlocks()
        self.state_locations = StateLocations(self.problems)

    @property
    def entries(self) -> int:
        """Number of (block, group, tier) triples."""
        return self._locations.entries

    def other_block_size(self, group: str, block_size: int) -> int:
        """The block size of the other groups if it differs from `block_size`; else 0."""
        others = {known.block_size for name, known in self._groups.items() if name != group} - {0, block_size}
        return min(others, default=0)

    def add_group(
        self, group: str, epoch: str, capacity: int = 0, block_size: int = 0, *, keeps_states: bool = False
    ) -> int:
        """Adds a group that has registered, without blocks, and returns its slot: the lowest that is free.

        `capacity`: number of its blocks in both tiers, 0 if unknown. `block_size`: tokens, 0 if unknown.
        `keeps_states`: prompts can start only at snapshots of states, of which the group has at most `capacity`.
        """
        self.remove_group(group)
        bit = self._free_bit()
        slot = bit.bit_length() - 1
        self._live |= bit
        self._groups[group] = _IndexedGroup(slot, bit, epoch, capacity, block_size, keeps_states)
        if keeps_states:
            self.state_locations.add_group(slot)
        self._update_moved()
        return slot

    def remove_group(self, group: str) -> None:
        """Removes a group and its blocks. Changes nothing for an unknown group.

        Many blocks are not dropped at once, because that would stop every stream of the router. No prefix matches them
        any more, and each later message of a group drops some.
        """
        indexed = self._groups.pop(group, None)
        if indexed is None:
            return
        self._locations.begin_removal(indexed.bit)
        self._locations.continue_removal(_REMOVALS_PER_MESSAGE)
        self.expected_blocks.remove_group(indexed.bit)
        self.state_locations.remove_group(indexed.slot)
        self._live &= ~indexed.bit
        self._update_moved()

    def apply_events(self, group: str, message: KvEvents) -> EventOutcome:
        """Applies the next events of a group, as far as they are new."""
        indexed = self._groups.get(group)
        if indexed is None or indexed.epoch != message.epoch:
            return self._ignore_unregistered(indexed, len(message.events))
        if indexed.next_sequence is None:
            return self._ignore(EventProblem.BEFORE_SNAPSHOT, len(message.events))
        known = indexed.next_sequence - message.sequence
        if known < 0:
            return self._request_snapshot(indexed)
        if known and known >= len(message.events):
            return self._ignore(EventProblem.REPEATED, len(message.events))
        self._store(indexed, message.events[known:] if known else message.events)
        indexed.next_sequence += len(message.events) - known
        return self._check_blocks(indexed)

    def apply_snapshot(self, group: str, chunk: SnapshotChunk) -> EventOutcome:
        """Adds the blocks of a chunk. The first chunk of a snapshot removes the blocks of the group before."""
        indexed = self._groups.get(group)
        if indexed is None or indexed.epoch != chunk.epoch:
            return self._ignore_unregistered(indexed, len(chunk.events))
        if chunk.first:
            self._forget(indexed)
            indexed.next_sequence = chunk.sequence
        elif indexed.is_requested:  # this chunk is of a snapshot from before the gap
            return self._ignore(EventProblem.BEFORE_SNAPSHOT, len(chunk.events))
        elif indexed.next_sequence != chunk.sequence:  # an earlier chunk, or an event before this one, is missing
            return self._request_snapshot(indexed)
        self._store(indexed, chunk.events)
        indexed.is_complete = chunk.last
        return self._check_blocks(indexed)

    def is_complete(self, group: str) -> bool:
        """Whether the index has every block of the group: its snapshot has come, and no event is missing since."""
        return (indexed := self._groups.get(group)) is not None and indexed.is_complete

    def add_expected(self, group: str, key: Hashable, chain: Sequence[bytes], snapshot_at: int = 0) -> None:
        """Records that a prompt with the blocks `chain` was sent to the group: they match there as expected until
        `remove_expected`, or until the group leaves. `key` identifies the prompt and is never used twice.
        `snapshot_at`: the number of blocks after which the group will save states, if it keeps any; 0 for nowhere."""
        if (indexed := self._groups.get(group)) is not None:
            self.expected_blocks.add(indexed.bit, key, chain)
            if snapshot_at:
                self.state_locations.add_expected(indexed.slot, key, chain[snapshot_at - 1])

    def remove_expected(self, group: str, key: Hashable) -> None:
        """Removes a prompt that the group has computed, or never will. Changes nothing if the prompt was removed
        before, or if the group has left since, even if the group has registered again."""
        if (indexed := self._groups.get(group)) is not None:
            self.expected_blocks.remove(indexed.bit, key)
            self.state_locations.remove_expected(indexed.slot, key)

    def match(self, chain: Sequence[bytes]) -> PrefixMatches:
        """By slot, how many leading blocks of `chain` each group holds or is expected to hold. For a group whose model
        keeps states: the number of leading blocks after which the prompt can start."""
        matches = self._match_blocks(chain)
        return self.state_locations.cut_matches(chain, matches) if self.state_locations.groups else matches

    def _match_blocks(self, chain: Sequence[bytes]) -> PrefixMatches:
        on_device, on_host = self._locations.groups_by_block
        expected = self.expected_blocks.match(chain)
        matches = match_chain(chain, self._live, on_device, on_host, expected, *self._locations.gaps)
        if self._moved is None:
            return matches
        slots, bits = self._moved
        by_slot = np.zeros((len(matches), slots.max() + 1))
        by_slot[:, slots] = np.array(matches)[:, bits]
        return PrefixMatches(*by_slot)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._live == sum(indexed.bit for indexed in self._groups.values()), "each group has a bit of its own"
        assert len({indexed.slot for indexed in self._groups.values()}) == len(self._groups), "two groups in one slot"
        self._locations.check()
        self.expected_blocks.check()
        self.state_locations.check()
        keeps_states = sum(1 << indexed.slot for indexed in self._groups.values() if indexed.keeps_states)
        assert self.state_locations.groups == keeps_states, "states of other groups"

    def _store(self, indexed: _IndexedGroup, events: Sequence[KvEvent]) -> None:
        self.events += len(events)
        self._locations.continue_removal(_REMOVALS_PER_MESSAGE)
        if indexed.keeps_states:
            self.state_locations.apply_events(indexed.slot, [event for event in events if event.tier == TIER_STATE])
            events = [event for event in events if event.tier != TIER_STATE]
        self._locations.apply_events(indexed.bit, events)

    def _check_blocks(self, indexed: _IndexedGroup) -> EventOutcome:
        if self._locations.gaps_of(indexed.bit) > 2 * self._locations.entries_of(indexed.bit):
            return self._request_snapshot(indexed)
        num_held = max(self._locations.entries_of(indexed.bit), self.state_locations.count_held(indexed.slot))
        if not indexed.capacity or num_held <= indexed.capacity:
            return EventOutcome.APPLIED
        return self._drop_impossible(indexed)

    def _drop_impossible(self, indexed: _IndexedGroup) -> EventOutcome:
        self.problems[EventProblem.IMPOSSIBLE] += 1
        self._forget(indexed)
        return EventOutcome.IMPOSSIBLE

    def _request_snapshot(self, indexed: _IndexedGroup) -> EventOutcome:
        self.problems[EventProblem.GAP] += 1
        self._forget(indexed)
        indexed.is_requested = True
        return EventOutcome.SNAPSHOT_NEEDED

    def _free_bit(self) -> int:
        """The lowest bit that no group has or had for blocks that are not dropped yet, nor for its slot."""
        taken = self._live | self._locations.leaving
        for indexed in self._groups.values():
            taken |= 1 << indexed.slot
        return ~taken & (taken + 1)

    def _update_moved(self) -> None:
        pairs = [(indexed.slot, indexed.bit.bit_length() - 1) for indexed in self._groups.values()]
        is_moved = any(slot != bit for slot, bit in pairs)
        self._moved = tuple(np.array(pairs, np.intp).T) if is_moved else None

    def _forget(self, indexed: _IndexedGroup) -> None:
        """Forgets the group's blocks. They keep its bit until they are dropped, little by little, and the group gets
        another bit."""
        if self._locations.begin_removal(indexed.bit):
            bit = self._free_bit()
            self.expected_blocks.move_group(indexed.bit, bit)
            self._live ^= indexed.bit | bit
            indexed.bit = bit
            self._update_moved()
            self._locations.continue_removal(_REMOVALS_PER_MESSAGE)
        self.state_locations.forget_held(indexed.slot)
        indexed.next_sequence = None
        indexed.is_complete = indexed.is_requested = False

    def _ignore_unregistered(self, indexed: _IndexedGroup | None, events: int) -> EventOutcome:
        return self._ignore(EventProblem.UNKNOWN_GROUP if indexed is None else EventProblem.OTHER_EPOCH, events)

    def _ignore(self, problem: EventProblem, events: int) -> EventOutcome:
        self.problems[problem] += events
        return EventOutcome.IGNORED
