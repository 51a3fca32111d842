"""PrefixIndex: which group holds which KV blocks, exactly, by block hash and tier.

Fed by each group's events in order. A new epoch, a gap or an incomplete snapshot means that nothing is known of a
group until its next snapshot is whole: a cold answer is slower, a false one would promise what is not there. Beside
what events say stands what is expected: the blocks of prompts that this router has just sent, until the group's own
events tell of them. It does not know tokens, links or costs.

A group is a bit, a block three bit sets (device, host, expected), so that one walk along a prompt's chain matches every
group at once.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from coatcheck.proto.stubs.worker_pb2 import KvEvent, KvEvents, SnapshotChunk
from coatcheck.router.routing.block_locations import BlockLocations, EventProblem
from coatcheck.router.routing.hit_prediction import HitPrediction
from coatcheck.router.routing.pending_prefixes import PendingPrefixes
from coatcheck.router.routing.prefix_match import PrefixMatch, walk
from coatcheck.router.routing.reuse_after_eviction import ReuseAfterEviction


class EventOutcome(Enum):
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
    troubles: Mapping[EventProblem, int]


@dataclass(slots=True)
class _Member:
    """One group, and where its events stand. `next_sequence` None: nothing is known until a snapshot has come."""

    bit: int
    epoch: str
    capacity: int  # most entries that it can have; 0: not said
    block_size: int  # tokens; 0: not said
    next_sequence: int | None = None
    staged: list[KvEvent] | None = None  # a snapshot on its way


class PrefixIndex:
    """Residency of blocks by (group, tier)."""

    def __init__(self) -> None:
        self.regret = ReuseAfterEviction()
        self.hit_prediction = HitPrediction()
        self.troubles: Counter[EventProblem] = Counter()
        self.events = self._snapshots = 0
        self._groups: dict[str, _Member] = {}
        self._names: dict[int, str] = {}
        self._live = 0  # every group's bit
        self._residency = BlockLocations(self.regret, self.troubles)
        self._pending = PendingPrefixes()

    @property
    def entries(self) -> int:
        """Blocks by group and tier."""
        return self._residency.entries

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
        self._groups[group] = _Member(free, epoch, capacity, block_size)
        self._names[free] = group

    def remove_group(self, group: str) -> None:
        """A group has gone, and with it all that it held; an unknown one already has."""
        member = self._groups.pop(group, None)
        if member is None:
            return
        self._residency.forget(member.bit)
        self._pending.remove_group(member.bit)
        self._live &= ~member.bit
        del self._names[member.bit]

    def apply(self, group: str, message: KvEvents) -> EventOutcome:
        """Takes the next events of a group."""
        member = self._groups.get(group)
        if member is None or member.epoch != message.epoch:
            return self._refuse(member, len(message.events))
        if member.next_sequence is None:
            return self._ignore(EventProblem.BEFORE_SNAPSHOT, len(message.events))
        known = member.next_sequence - message.sequence
        if known < 0:
            self.troubles[EventProblem.GAP] += 1
            self._forget(member)
            return EventOutcome.SNAPSHOT_NEEDED
        if known and known >= len(message.events):
            return self._ignore(EventProblem.REPEATED, len(message.events))
        self._store(member, message.events[known:] if known else message.events)
        member.next_sequence += len(message.events) - known
        return self._weigh(member)

    def apply_snapshot(self, group: str, chunk: SnapshotChunk) -> EventOutcome:
        """Takes a piece of a snapshot; only a whole one counts, and it replaces what was known."""
        member = self._groups.get(group)
        if member is None or member.epoch != chunk.epoch:
            return self._refuse(member, len(chunk.events))
        if chunk.first:
            member.staged = []
        if member.staged is None:  # its beginning was missed
            self.troubles[EventProblem.GAP] += 1
            self._forget(member)
            return EventOutcome.SNAPSHOT_NEEDED
        member.staged.extend(chunk.events)
        if member.capacity and len(member.staged) > member.capacity:
            return self._disbelieve(member)
        if chunk.last:
            staged = member.staged
            self._forget(member)
            self._store(member, staged)
            member.next_sequence = chunk.sequence
            self._snapshots += 1
        return EventOutcome.APPLIED

    def add_pending(self, group: str, key: Hashable, chain: Sequence[bytes]) -> None:
        """Records that a prompt with the blocks `chain` was sent to the group: they match there as expected until
        `remove_pending`, or until the group leaves. `key` identifies the prompt and is never used twice."""
        if (member := self._groups.get(group)) is not None:
            self._pending.add(member.bit, key, chain)

    def remove_pending(self, group: str, key: Hashable) -> None:
        """The group's events contain the prompt's blocks, or never will. Changes nothing if the prompt was removed
        before, or if the group has left since, even if the group is back."""
        if (member := self._groups.get(group)) is not None:
            self._pending.remove(member.bit, key)

    def matched_blocks(self, chain: Sequence[bytes]) -> dict[str, PrefixMatch]:
        """For each group the blocks that it holds, or is expected to, from the start of `chain` without a break. Groups
        that hold not even the first are left out."""
        on_device, on_host = self._residency.where
        matches = walk(chain, self._live, on_device, on_host, self._pending.where)
        return {self._names[bit]: match for bit, match in matches}

    def stats(self) -> PrefixIndexStats:
        """Counts as of now."""
        return PrefixIndexStats(
            groups=len(self._groups),
            blocks=self._residency.blocks,
            entries=self.entries,
            expected=len(self._pending),
            events=self.events,
            snapshots=self._snapshots,
            troubles=dict(self.troubles),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._live == sum(member.bit for member in self._groups.values()), "a group's bit is lost or shared"
        assert self._names == {member.bit: name for name, member in self._groups.items()}
        self._residency.check()
        self._pending.check()

    def _store(self, member: _Member, events: Sequence[KvEvent]) -> None:
        self.events += len(events)
        self._residency.apply(member.bit, events)

    def _weigh(self, member: _Member) -> EventOutcome:
        if not member.capacity or self._residency.entries_of(member.bit) <= member.capacity:
            return EventOutcome.APPLIED
        return self._disbelieve(member)

    def _disbelieve(self, member: _Member) -> EventOutcome:
        self.troubles[EventProblem.IMPOSSIBLE] += 1
        self._forget(member)
        return EventOutcome.IMPOSSIBLE

    def _forget(self, member: _Member) -> None:
        self._residency.forget(member.bit)
        member.next_sequence = None
        member.staged = None

    def _refuse(self, member: _Member | None, events: int) -> EventOutcome:
        return self._ignore(EventProblem.UNKNOWN_GROUP if member is None else EventProblem.OTHER_EPOCH, events)

    def _ignore(self, trouble: EventProblem, events: int) -> EventOutcome:
        self.troubles[trouble] += events
        return EventOutcome.IGNORED
