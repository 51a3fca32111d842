"""PrefixIndex: which group holds which KV blocks, exactly, by block hash and tier.

Fed by each group's events in order. A new epoch, a gap or an incomplete snapshot means that nothing is known of a
group until its next snapshot is whole: a cold answer is slower, a false one would promise what is not there. Beside
what events say stands what is expected: the blocks of prompts that this router has just sent, until the group's own
events tell of them. It does not know tokens, links or costs.

A group is a bit, a block three bit sets (device, host, expected), so that one walk along a prompt's chain matches every
group at once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ..proto.block_hash import HASH_BYTES
from ..proto.worker_pb2 import TIER_DEVICE, TIER_HOST, KvEvent, KvEvents, SnapshotChunk
from .event_trouble import EventTrouble
from .expectations import Expectation, Expectations
from .prefix_match import Match, walk
from .regret import Regret

_TIERS: Final = (TIER_DEVICE, TIER_HOST)


class Outcome(Enum):
    """What became of a message."""

    APPLIED = "applied"
    IGNORED = "ignored"  # old, or of a group that is waiting for its snapshot
    SNAPSHOT_NEEDED = "snapshot needed"
    IMPOSSIBLE = "impossible"  # it holds more blocks than it has


@dataclass(frozen=True, slots=True)
class PrefixIndexStats:
    """Since the start, but for `groups`, `blocks` (distinct), `entries` (block, group and tier) and `expected`."""

    groups: int
    blocks: int
    entries: int
    expected: int
    events: int
    snapshots: int
    troubles: Mapping[EventTrouble, int]


@dataclass(slots=True)
class _Holding:
    """What is known of one group. `next_sequence` None: nothing until a snapshot has come."""

    bit: int
    epoch: str
    capacity: int  # most entries that it can have; 0: not said
    block_size: int  # tokens; 0: not said
    next_sequence: int | None = None
    tiers: dict[bytes, int] = field(default_factory=dict)  # block hash -> set of tiers, as bits
    staged: list[KvEvent] | None = None  # a snapshot on its way
    entries: int = 0  # in both tiers


class PrefixIndex:
    """Residency of blocks by (group, tier)."""

    def __init__(self) -> None:
        self.regret = Regret()
        self._groups: dict[str, _Holding] = {}
        self._names: dict[int, str] = {}
        self._live = 0  # every group's bit
        self._where: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})  # per tier: block hash -> groups
        self._expectations = Expectations()
        self.troubles: Counter[EventTrouble] = Counter()
        self.events = self._snapshots = 0

    @property
    def entries(self) -> int:
        """Blocks by group and tier."""
        return sum(holding.entries for holding in self._groups.values())

    def other_block_size(self, group: str, block_size: int) -> int:
        """That of the groups beside this one, if it is another; 0 if it is the same, or there is none."""
        others = {known.block_size for name, known in self._groups.items() if name != group} - {0, block_size}
        return min(others, default=0)

    def add_group(self, group: str, epoch: str, capacity: int = 0, block_size: int = 0) -> None:
        """A group has registered, with room for so many blocks of so many tokens (0: not said); of an earlier
        incarnation nothing is left."""
        self.remove_group(group)
        free = ~self._live & (self._live + 1)  # the lowest bit not taken
        self._live |= free
        self._groups[group] = _Holding(free, epoch, capacity, block_size)
        self._names[free] = group

    def remove_group(self, group: str) -> None:
        """A group has gone, and with it all that it held; an unknown one already has."""
        holding = self._groups.pop(group, None)
        if holding is None:
            return
        self._clear(holding)
        self._expectations.forget(holding.bit)
        self._live &= ~holding.bit
        del self._names[holding.bit]

    def apply(self, group: str, message: KvEvents) -> Outcome:
        """Takes the next events of a group."""
        holding = self._groups.get(group)
        if holding is None or holding.epoch != message.epoch:
            return self._refuse(holding, len(message.events))
        if holding.next_sequence is None:
            return self._ignore(EventTrouble.BEFORE_SNAPSHOT, len(message.events))
        known = holding.next_sequence - message.sequence
        if known < 0:
            self.troubles[EventTrouble.GAP] += 1
            self._forget(holding)
            return Outcome.SNAPSHOT_NEEDED
        if known and known >= len(message.events):
            return self._ignore(EventTrouble.REPEATED, len(message.events))
        self._store(holding, message.events[known:] if known else message.events)
        holding.next_sequence += len(message.events) - known
        return self._weigh(holding)

    def apply_snapshot(self, group: str, chunk: SnapshotChunk) -> Outcome:
        """Takes a piece of a snapshot; only a whole one counts, and it replaces what was known."""
        holding = self._groups.get(group)
        if holding is None or holding.epoch != chunk.epoch:
            return self._refuse(holding, len(chunk.events))
        if chunk.first:
            holding.staged = []
        if holding.staged is None:  # its beginning was missed
            self.troubles[EventTrouble.GAP] += 1
            self._forget(holding)
            return Outcome.SNAPSHOT_NEEDED
        holding.staged.extend(chunk.events)
        if holding.capacity and len(holding.staged) > holding.capacity:
            return self._disbelieve(holding)
        if chunk.last:
            staged = holding.staged
            self._forget(holding)
            self._store(holding, staged)
            holding.next_sequence = chunk.sequence
            self._snapshots += 1
        return Outcome.APPLIED

    def expect(self, group: str, chain: Sequence[bytes]) -> Expectation | None:
        """A prompt of this chain has been sent to the group: until `settle` its blocks match as expected there."""
        holding = self._groups.get(group)
        if holding is None:
            return None
        self._expectations.add(holding.bit, chain)
        return Expectation(group, holding.epoch, chain)

    def settle(self, expectation: Expectation) -> None:
        """The group's events have told of the prompt's blocks, or never will; call it once."""
        holding = self._groups.get(expectation.group)
        if holding is not None and holding.epoch == expectation.epoch:  # else it went with its incarnation
            self._expectations.remove(holding.bit, expectation.chain)

    def matched_blocks(self, chain: Sequence[bytes]) -> dict[str, Match]:
        """For each group the blocks that it holds, or is expected to, from the start of `chain` without a break. Groups
        that hold not even the first are left out."""
        on_device, on_host = self._where
        matches = walk(chain, self._live, on_device, on_host, self._expectations.where)
        return {self._names[bit]: match for bit, match in matches}

    def stats(self) -> PrefixIndexStats:
        """Counts as of now."""
        on_device, on_host = self._where
        return PrefixIndexStats(
            groups=len(self._groups),
            blocks=len(on_device.keys() | on_host.keys()),
            entries=self.entries,
            expected=len(self._expectations),
            events=self.events,
            snapshots=self._snapshots,
            troubles=dict(self.troubles),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._live == sum(holding.bit for holding in self._groups.values()), "a group's bit is lost or shared"
        assert self._names == {holding.bit: name for name, holding in self._groups.items()}
        for place, where in enumerate(self._where):
            expected: dict[bytes, int] = {}
            for holding in self._groups.values():
                for block, tiers in holding.tiers.items():
                    assert tiers, "an entry in no tier"
                    if tiers >> place & 1:
                        expected[block] = expected.get(block, 0) | holding.bit
            assert where == expected, "the shared index and the groups' own disagree"
        for holding in self._groups.values():
            assert holding.entries == sum(tiers.bit_count() for tiers in holding.tiers.values()), "entries miscounted"
        self._expectations.check()

    def _store(self, holding: _Holding, events: Iterable[KvEvent]) -> None:
        held, bit, regret = holding.tiers, holding.bit, self.regret
        on_device, on_host = self._where
        for event in events:
            self.events += 1
            block, tier = event.block_hash, event.tier
            if tier not in _TIERS or len(block) != HASH_BYTES:
                self.troubles[EventTrouble.UNNAMED] += 1
                continue
            place = tier - 1
            where, tiers = self._where[place], held.get(block, 0)
            if event.stored:
                if not tiers >> place & 1:
                    held[block] = tiers | 1 << place
                    where[block] = where.get(block, 0) | bit
                    holding.entries += 1
                    regret.stored(block)
                if (parent := event.parent_hash) and parent not in held:
                    self.troubles[EventTrouble.NO_PARENT] += 1
            elif tiers >> place & 1:
                _set_or_drop(held, block, tiers & ~(1 << place))
                _set_or_drop(where, block, where[block] & ~bit)
                holding.entries -= 1
                if block not in on_device and block not in on_host:
                    regret.evicted(block, len(on_device))

    def _weigh(self, holding: _Holding) -> Outcome:
        if not holding.capacity or holding.entries <= holding.capacity:
            return Outcome.APPLIED
        return self._disbelieve(holding)

    def _disbelieve(self, holding: _Holding) -> Outcome:
        self.troubles[EventTrouble.IMPOSSIBLE] += 1
        self._forget(holding)
        return Outcome.IMPOSSIBLE

    def _forget(self, holding: _Holding) -> None:
        self._clear(holding)
        holding.next_sequence = None
        holding.staged = None

    def _clear(self, holding: _Holding) -> None:
        for block, tiers in holding.tiers.items():
            for place, where in enumerate(self._where):
                if tiers >> place & 1:
                    _set_or_drop(where, block, where[block] & ~holding.bit)
        holding.tiers.clear()
        holding.entries = 0

    def _refuse(self, holding: _Holding | None, events: int) -> Outcome:
        return self._ignore(EventTrouble.UNKNOWN_GROUP if holding is None else EventTrouble.OTHER_EPOCH, events)

    def _ignore(self, trouble: EventTrouble, events: int) -> Outcome:
        self.troubles[trouble] += events
        return Outcome.IGNORED


def _set_or_drop(bits: dict[bytes, int], block: bytes, value: int) -> None:
    if value:
        bits[block] = value
    else:
        del bits[block]
