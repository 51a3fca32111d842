"""BlockLocations: the set of groups that hold each block, by tier, and the blocks of each group.

The sets of groups serve to match a chain of blocks; the blocks of a group serve to remove the group. Each group has one
bit; a set of groups is an int bitmask. PrefixIndex checks epochs and the order of events before it calls
`apply_events`.
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
    are dropped until its next snapshot. An event with NO_PARENT is applied: its block
    matches nothing without the parent. GAP and IMPOSSIBLE are counted per message, the others per event.
    """

    UNKNOWN_GROUP = "unknown_group"  # the group has not registered, or has left
    OTHER_EPOCH = "other_epoch"  # of an earlier incarnation
    BEFORE_SNAPSHOT = "before_snapshot"  # no snapshot has begun since the registration or the last gap
    REPEATED = "repeated"
    GAP = "gap"  # events are missing; a snapshot is requested
    MALFORMED = "malformed"  # the tier is unknown, or the block hash has the wrong length
    NO_PARENT = "no_parent"  # the group does not hold the parent: the block matches once the parent is stored
    IMPOSSIBLE = "impossible"  # the group reports more blocks than it registered; it is ejected


class BlockLocations:
    """`groups_by_block`: for device and host a mapping from block to the groups that hold it there."""

    def __init__(self, problems: Counter[EventProblem]) -> None:
        self.groups_by_block = (SplitTable(), SplitTable())
        self._problems = problems
        self._held: dict[int, SplitTable] = {}  # group -> block -> bitmask of tiers
        self._entries: Counter[int] = Counter()  # group -> blocks in both tiers
        self._leaving: dict[int, SplitTable] = {}  # as `_held`: what is left to drop of removed groups

    @property
    def entries(self) -> int:
        """Number of (block, group, tier) triples."""
        return self._entries.total()

    def entries_of(self, bit: int) -> int:
        """Number of a group's blocks in both tiers."""
        return self._entries[bit]

    def apply_events(self, bit: int, events: Iterable[KvEvent]) -> None:
        """Applies what a group has stored and removed, in order."""
        table = self._held.get(bit)
        if table is None:
            table = self._held[bit] = SplitTable()
        problems, entries = self._problems, self._entries[bit]
        on_device, on_host = (tier.by_first_byte for tier in self.groups_by_block)
        held_by_first_byte = table.by_first_byte
        # Neighbouring blocks often have the same set of groups before an event, and then after it too. They share one
        # int, which saves memory, and which lets match_chain skip the comparison.
        before = after = 0
        for event in events:
            block, tier = event.block_hash, event.tier
            if tier not in _TIERS or len(block) != HASH_BYTES:
                problems[EventProblem.MALFORMED] += 1
                continue
            first = block[0]
            groups_by_block, flag = (on_device[first], 1) if tier == TIER_DEVICE else (on_host[first], 2)
            held = held_by_first_byte[first]
            tiers = held.get(block, 0)
            if event.stored:
                if not tiers & flag:
                    held[block] = tiers | flag
                    groups = groups_by_block.setdefault(block, bit)
                    if groups is not bit:
                        if groups is not before or not after & bit:
                            before, after = groups, groups | bit
                        groups_by_block[block] = after
                    entries += 1
                if (parent := event.parent_hash) and parent not in held_by_first_byte[parent[0]]:
                    problems[EventProblem.NO_PARENT] += 1
            elif tiers & flag:
                _set_or_drop(held, block, tiers & ~flag)
                groups = groups_by_block[block]
                if groups is not before or after & bit:
                    before, after = groups, groups & ~bit
                _set_or_drop(groups_by_block, block, after)
                entries -= 1
        self._entries[bit] = entries
        for grown in (table, *self.groups_by_block):
            grown.split_if_large()

    @property
    def leaving(self) -> int:
        """The set of removed groups that `groups_by_block` still has. Their bits must not be used again."""
        return sum(self._leaving)

    def remove_group(self, bit: int) -> None:
        """Drops all blocks of a group at once."""
        held = self._held.pop(bit, SplitTable())
        self._drop_blocks(bit, held, len(held))
        del self._entries[bit]

    def begin_removal(self, bit: int) -> None:
        """Forgets a group; `continue_removal` drops its blocks."""
        if held := self._held.pop(bit, None):
            self._leaving[bit] = held
        del self._entries[bit]

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
        for tier_index, groups_by_block in enumerate(self.groups_by_block):
            expected: dict[bytes, int] = {}
            for bit, held in (*self._held.items(), *self._leaving.items()):
                for block, tiers in held.items():
                    assert tiers, "a block in no tier"
                    if tiers >> tier_index & 1:
                        expected[block] = expected.get(block, 0) | bit
            groups_by_block.check()
            assert dict(groups_by_block.items()) == expected, "the sets of groups and the groups' own blocks disagree"
        for bit, held in self._held.items():
            held.check()
            assert self._entries[bit] == sum(tiers.bit_count() for _, tiers in held.items()), "entries miscounted"
        assert self._entries.keys() <= self._held.keys(), "entries of a group that holds nothing"
        assert not self._leaving.keys() & self._held.keys(), "the bit of a group that leaves is used again"

    def _drop_blocks(self, bit: int, held: SplitTable, count: int) -> None:
        """Drops the last `count` blocks of `held`."""
        before = after = 0  # as in apply_events
        for block, tiers in islice(held.pop_each(), count):
            for tier_index, tier in enumerate(self.groups_by_block):
                if tiers >> tier_index & 1:
                    groups_by_block = tier.by_first_byte[block[0]]
                    groups = groups_by_block[block]
                    if groups is not before or after & bit:
                        before, after = groups, groups & ~bit
                    _set_or_drop(groups_by_block, block, after)


def _set_or_drop(bits: dict[bytes, int], block: bytes, value: int) -> None:
    if value:
        bits[block] = value
    else:
        del bits[block]
