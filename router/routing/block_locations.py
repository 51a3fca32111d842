"""BlockLocations: the set of groups that hold each block, by tier, and the blocks of each group.

Matching a chain uses the sets of groups; removing a group uses the blocks of the group. Each group has one bit, so a
set of groups is an int bitmask. PrefixIndex checks epochs and the order of events before it calls `apply_events`.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Final

from coatcheck.proto.block_hash import HASH_BYTES
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, TIER_HOST, KvEvent
from coatcheck.router.routing.split_table import SplitTable

_TIERS: Final = (TIER_DEVICE, TIER_HOST)


class EventProblem(Enum):
    """What can be wrong with a group's KV events; the values are metric labels.

    None of these creates a prefix that the group does not hold: the wrong event is ignored, or all blocks of the group
    are dropped until its next snapshot. An event with NO_PARENT is applied: its block matches nothing without the
    parent. GAP and IMPOSSIBLE are counted per message, the others per event.
    """

    UNKNOWN_GROUP = "unknown_group"  # the group has not registered, or has left
    OTHER_EPOCH = "other_epoch"  # of an earlier incarnation
    BEFORE_SNAPSHOT = "before_snapshot"  # no snapshot has begun since the registration or the last gap
    REPEATED = "repeated"
    GAP = "gap"  # events are missing, or name wrong parents; a snapshot is requested
    MALFORMED = "malformed"  # the tier is unknown, or the block hash has the wrong length
    NO_PARENT = "no_parent"  # the group does not hold the parent: the block matches once the parent is stored
    IMPOSSIBLE = "impossible"  # the group reports more blocks or snapshots than it registered blocks; it is ejected


# A group's table maps a block to an int: two bits for the tiers that hold the block, then two counters of its children
# (the blocks that name it as parent): those that the group holds on the device, and those that it holds on the host
# alone. A block that the group does not hold is in the table while the group holds a child of it.
_DEVICE_CHILD: Final = 4
_HOST_CHILD: Final = 1 << 34
# By the tiers of a child: what the child adds to its parent's value, and the bits of the number that it is counted in.
_CHILD: Final = (0, _DEVICE_CHILD, _HOST_CHILD, _DEVICE_CHILD)
_CHILDREN_MASK: Final = (0, _HOST_CHILD - _DEVICE_CHILD, -_HOST_CHILD, _HOST_CHILD - _DEVICE_CHILD)


class BlockLocations:
    """`groups_by_block`: for device and host a mapping from block to the groups that hold it there.

    `gaps`: a gap of a group is a block that it does not hold although it holds a child of the block. The first table
    has the gaps on the device, the second those in both tiers together; each maps a block to the groups with this gap.
    Between two gaps a group holds either the first blocks of a chain or none, so match_chain need not look up every
    block. Groups evict a prompt's last blocks first, so gaps are few.
    """

    def __init__(self, problems: Counter[EventProblem]) -> None:
        self.groups_by_block = (SplitTable(), SplitTable())
        self.gaps = (SplitTable(), SplitTable())
        self._problems = problems
        self._held: dict[int, SplitTable] = {}  # group -> block -> tiers and number of children
        self._entries: Counter[int] = Counter()  # group -> blocks in both tiers
        self._gaps: Counter[int] = Counter()  # group -> its entries in `gaps`
        self._leaving: dict[int, SplitTable] = {}  # as `_held`, for removed groups: blocks that are still to be dropped

    @property
    def entries(self) -> int:
        """Number of (block, group, tier) triples."""
        return self._entries.total()

    def entries_of(self, bit: int) -> int:
        """Number of a group's blocks in both tiers."""
        return self._entries[bit]

    def gaps_of(self, bit: int) -> int:
        """Number of a group's gaps. It exceeds twice `entries_of` only if the group's events name wrong parents."""
        return self._gaps[bit]

    def apply_events(self, bit: int, events: Iterable[KvEvent]) -> None:
        """Applies KV events of one group, in order."""
        table = self._held.get(bit)
        if table is None:
            table = self._held[bit] = SplitTable()
        problems, entries = self._problems, self._entries[bit]
        on_device, on_host = (tier.by_first_byte for tier in self.groups_by_block)
        held_by_first_byte, child_counts = table.by_first_byte, _CHILD
        # Neighbouring blocks often have the same set of groups before an event, and then after it too. They share one
        # int, which saves memory, and lets match_chain compare their sets at once.
        before = after = 0
        for event in events:
            block, tier = event.block_hash, event.tier
            if tier not in _TIERS or len(block) != HASH_BYTES:
                problems[EventProblem.MALFORMED] += 1
                continue
            first = block[0]
            groups_by_block, flag = (on_device[first], 1) if tier == TIER_DEVICE else (on_host[first], 2)
            held = held_by_first_byte[first]
            known = held.get(block, 0)
            if is_stored := event.stored:
                now = known | flag
                if now != known:
                    held[block] = now
                    groups = groups_by_block.setdefault(block, bit)
                    if groups is not bit:
                        if groups is not before or not after & bit:
                            before, after = groups, groups | bit
                        groups_by_block[block] = after
                    entries += 1
            elif known & flag:
                if now := known ^ flag:
                    held[block] = now
                else:
                    del held[block]
                groups = groups_by_block.pop(block)
                if groups is not bit:
                    if groups is not before or after & bit:
                        before, after = groups, groups & ~bit
                    if after:
                        groups_by_block[block] = after
                entries -= 1
            else:
                continue
            if known > 3:  # the group holds blocks after this one
                self._update_gaps(bit, block, known, now)
            if parent := event.parent_hash:
                held = held_by_first_byte[parent[0]]
                children = held.get(parent, 0)
                if is_stored and not children & 3:
                    problems[EventProblem.NO_PARENT] += 1
                tiers = known & 3
                added = child_counts[now & 3] - child_counts[tiers]
                # The second condition fails only if an earlier event of this block named another parent, or none.
                if added and (not tiers or children & _CHILDREN_MASK[tiers]):
                    if children & 1:  # the parent is on the device, so there is no gap
                        held[parent] = children + added
                    else:
                        _set_or_drop(held, parent, children + added)
                        self._update_gaps(bit, parent, children, children + added)
        self._entries[bit] = entries
        for grown in (table, *self.groups_by_block, *self.gaps):
            grown.split_if_large()

    @property
    def leaving(self) -> int:
        """The set of removed groups that `groups_by_block` still has. Their bits must not be used again."""
        return sum(self._leaving)

    def begin_removal(self, bit: int) -> bool:
        """Forgets a group, and returns whether it held a block. `continue_removal` drops its blocks."""
        held = self._held.pop(bit, None)
        del self._entries[bit]
        if not held:
            return False
        self._leaving[bit] = held
        return True

    def continue_removal(self, max_blocks: int) -> None:
        """Drops at most `max_blocks` blocks of the groups that leave."""
        for bit, held in list(self._leaving.items()):
            count = min(max_blocks, len(held))
            self._drop_blocks(bit, held, count)
            max_blocks -= count
            if not held:
                del self._leaving[bit]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        everyone = (*self._held.items(), *self._leaving.items())
        for tier_index, (groups_by_block, gaps) in enumerate(zip(self.groups_by_block, self.gaps, strict=True)):
            expected: dict[bytes, int] = {}
            expected_gaps: dict[bytes, int] = {}
            for bit, held in everyone:
                for block, value in held.items():
                    assert value, "a block in no tier and without a child"
                    if value >> tier_index & 1:
                        expected[block] = expected.get(block, 0) | bit
                    if _gaps_at(value) >> tier_index & 1:
                        expected_gaps[block] = expected_gaps.get(block, 0) | bit
            groups_by_block.check()
            gaps.check()
            assert dict(groups_by_block.items()) == expected, "the sets of groups and the groups' own blocks disagree"
            assert dict(gaps.items()) == expected_gaps, "the gaps and the groups' own blocks disagree"
        for bit, held in self._held.items():
            held.check()
            values = [value for _, value in held.items()]
            tiers = [value & 3 for value in values]
            assert self._entries[bit] == sum(map(int.bit_count, tiers)), "entries miscounted"
            assert self._gaps[bit] == sum(_gaps_at(value).bit_count() for value in values), "gaps miscounted"
        assert self._entries.keys() | self._gaps.keys() <= self._held.keys(), "entries of a group that holds nothing"
        assert not self._leaving.keys() & self._held.keys(), "the bit of a group that leaves is used again"

    def _update_gaps(self, bit: int, block: bytes, known: int, now: int) -> None:
        """Changes `gaps` after the group's value of a block has changed from `known` to `now`."""
        changed = _gaps_at(known) ^ _gaps_at(now)
        for index, gaps in enumerate(self.gaps):
            if changed >> index & 1:
                groups = gaps.get(block) ^ bit
                _set_or_drop(gaps.by_first_byte[block[0]], block, groups)
                self._gaps[bit] += 1 if groups & bit else -1

    def _drop_blocks(self, bit: int, held: SplitTable, count: int) -> None:
        """Drops the last `count` blocks of `held`."""
        before = after = 0  # as in apply_events
        for block, value in islice(held.pop_each(), count):
            for tier_index, tier in enumerate(self.groups_by_block):
                if value >> tier_index & 1:
                    groups_by_block = tier.by_first_byte[block[0]]
                    groups = groups_by_block[block]
                    if groups is not before or after & bit:
                        before, after = groups, groups & ~bit
                    _set_or_drop(groups_by_block, block, after)
            if _gaps_at(value):
                self._update_gaps(bit, block, value, 0)
        del self._gaps[bit]


def _set_or_drop(bits: dict[bytes, int], block: bytes, value: int) -> None:
    if value:
        bits[block] = value
    else:
        del bits[block]


def _gaps_at(value: int) -> int:
    """The tables of `gaps` that contain a block with this value, as bits: 1 is the device's, 2 that of both tiers."""
    if value & 1 or value <= 3:
        return 0
    return (1 if value & _CHILDREN_MASK[1] else 0) | (0 if value & 3 else 2)
