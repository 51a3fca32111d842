"""PrefixIndex: which group holds which KV blocks, exactly, by block hash and tier.

Fed by each group's events in order. A new epoch, a gap or an incomplete snapshot means that nothing is known of a
group until its next snapshot is whole: a cold answer is slower, a false one would promise what is not there. It does
not know tokens, links or costs.

A group is a bit, a block a pair of bit sets, so that one walk along a prompt's chain matches every group at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..proto.worker_pb2 import TIER_DEVICE, TIER_HOST, KvEvent, KvEvents, SnapshotChunk

_TIERS = (TIER_DEVICE, TIER_HOST)


class Outcome(Enum):
    """What became of a message."""

    APPLIED = "applied"
    IGNORED = "ignored"  # old, or of a group that is waiting for its snapshot
    SNAPSHOT_NEEDED = "snapshot needed"


@dataclass(frozen=True, slots=True)
class PrefixIndexStats:
    """Counts since the start, except `groups`, `blocks` (distinct) and `entries` (block, group and tier)."""

    groups: int
    blocks: int
    entries: int
    events: int
    snapshots: int
    gaps: int
    ignored: int


@dataclass(slots=True)
class _Holding:
    """What is known of one group. `next_sequence` None: nothing until a snapshot has come."""

    bit: int
    epoch: str = ""
    next_sequence: int | None = None
    tiers: dict[bytes, int] = field(default_factory=dict)  # block hash -> set of tiers, as bits
    staged: list[KvEvent] | None = None  # a snapshot on its way


class PrefixIndex:
    """Residency of blocks by (group, tier)."""

    def __init__(self) -> None:
        self._groups: dict[str, _Holding] = {}
        self._names: dict[int, str] = {}
        self._live = 0  # every group's bit
        self._where: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})  # per tier: block hash -> groups
        self._events = self._snapshots = self._gaps = self._ignored = 0

    def add_group(self, group: str, epoch: str) -> None:
        """A group has registered; of an earlier incarnation nothing is left."""
        self.remove_group(group)
        free = ~self._live & (self._live + 1)  # the lowest bit not taken
        self._live |= free
        self._groups[group] = _Holding(free, epoch)
        self._names[free] = group

    def remove_group(self, group: str) -> None:
        """A group has gone, and with it all that it held; an unknown one already has."""
        holding = self._groups.pop(group, None)
        if holding is None:
            return
        self._clear(holding)
        self._live &= ~holding.bit
        del self._names[holding.bit]

    def apply(self, group: str, message: KvEvents) -> Outcome:
        """Takes the next events of a group."""
        holding = self._groups.get(group)
        if holding is None or holding.epoch != message.epoch or holding.next_sequence is None:
            return self._ignore(len(message.events))
        known = holding.next_sequence - message.sequence
        if known < 0:
            self._gaps += 1
            self._forget(holding)
            return Outcome.SNAPSHOT_NEEDED
        if known and known >= len(message.events):
            return self._ignore(len(message.events))
        self._store(holding, message.events[known:])
        holding.next_sequence += len(message.events) - known
        return Outcome.APPLIED

    def apply_snapshot(self, group: str, chunk: SnapshotChunk) -> Outcome:
        """Takes a piece of a snapshot; only a whole one counts, and it replaces what was known."""
        holding = self._groups.get(group)
        if holding is None or holding.epoch != chunk.epoch:
            return self._ignore(len(chunk.events))
        if chunk.first:
            holding.staged = []
        if holding.staged is None:  # its beginning was missed
            self._gaps += 1
            self._forget(holding)
            return Outcome.SNAPSHOT_NEEDED
        holding.staged.extend(chunk.events)
        if chunk.last:
            staged = holding.staged
            self._forget(holding)
            self._store(holding, staged)
            holding.next_sequence = chunk.sequence
            self._snapshots += 1
        return Outcome.APPLIED

    def matched_blocks(self, chain: Sequence[bytes]) -> dict[str, tuple[int, int]]:
        """For each group the blocks that it holds from the start of `chain` without a break: on the device, and on the
        host alone. Groups that hold not even the first are left out."""
        on_device, on_host = self._where
        length: dict[int, int] = {}
        host_only: dict[int, int] = {}
        alive = self._live
        for depth, block in enumerate(chain):
            if not (missing := alive & ~on_device.get(block, 0)):
                continue
            hosting = missing & on_host.get(block, 0)
            for bit in _bits(hosting):
                host_only[bit] = host_only.get(bit, 0) + 1
            for bit in _bits(missing ^ hosting):
                length[bit] = depth
            alive &= ~missing | hosting
            if not alive:
                break
        for bit in _bits(alive):
            length[bit] = len(chain)
        counts = ((bit, blocks, host_only.get(bit, 0)) for bit, blocks in length.items() if blocks)
        return {self._names[bit]: (blocks - host, host) for bit, blocks, host in counts}

    def stats(self) -> PrefixIndexStats:
        """Counts as of now."""
        on_device, on_host = self._where
        return PrefixIndexStats(
            groups=len(self._groups),
            blocks=len(on_device.keys() | on_host.keys()),
            entries=sum(tiers.bit_count() for holding in self._groups.values() for tiers in holding.tiers.values()),
            events=self._events,
            snapshots=self._snapshots,
            gaps=self._gaps,
            ignored=self._ignored,
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

    def _store(self, holding: _Holding, events: Iterable[KvEvent]) -> None:
        for event in events:
            self._events += 1
            if event.tier not in _TIERS or not event.block_hash:
                self._ignored += 1
                continue
            place = _TIERS.index(event.tier)
            where, block, tiers = self._where[place], event.block_hash, holding.tiers.get(event.block_hash, 0)
            if event.stored:
                holding.tiers[block] = tiers | 1 << place
                where[block] = where.get(block, 0) | holding.bit
            elif tiers >> place & 1:
                _set_or_drop(holding.tiers, block, tiers & ~(1 << place))
                _set_or_drop(where, block, where[block] & ~holding.bit)

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

    def _ignore(self, events: int) -> Outcome:
        self._ignored += events
        return Outcome.IGNORED


def _set_or_drop(bits: dict[bytes, int], block: bytes, value: int) -> None:
    if value:
        bits[block] = value
    else:
        del bits[block]


def _bits(mask: int) -> Iterable[int]:
    """Each set bit by itself."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
