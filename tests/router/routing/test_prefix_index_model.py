"""PrefixIndex compared with a model of plain sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    TIER_HOST,
    KvEvents,
    SnapshotChunk,
    Tier,
)
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from tests.examples import examples
from tests.router.routing.index_events import CHAIN, matched_blocks, removed, stored

pytestmark = pytest.mark.usefixtures("slow_removal", "early_split")

TIERS = st.sampled_from([TIER_DEVICE, TIER_HOST])
NAMES = st.sampled_from(["a", "b", "c"])


class IndexAgainstSets(RuleBasedStateMachine):
    """The same events into the index and into plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.epochs: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.held: dict[str, set[tuple[int, Tier]] | None] = {}  # None: waiting for a snapshot
        self.complete: set[str] = set()  # groups whose snapshot has ended
        self.requested: set[str] = set()  # groups that were asked for a snapshot, after a gap
        self.sent: list[tuple[int, str, int]] = []  # key, group and number of blocks of a prompt
        self.removed: list[tuple[int, str, int]] = []  # prompts that were removed, or whose group has gone since
        self.count = 0

    @rule(group=NAMES)
    def register(self, group: str) -> None:
        self.count += 1
        self.epochs[group], self.sequences[group], self.held[group] = self.count, 0, None
        self.index.add_group(group, str(self.count))
        self.forget_sent(group)
        self.forget_snapshot(group)

    @rule(group=NAMES)
    def attach_again(self, group: str) -> None:
        """A new stream to the same process: the epoch stays, and expected blocks are lost."""
        if group in self.epochs:
            self.held[group] = None
            self.index.add_group(group, str(self.epochs[group]))
            self.forget_sent(group)
            self.forget_snapshot(group)

    def forget_sent(self, group: str) -> None:
        self.removed += [prompt for prompt in self.sent if prompt[1] == group]
        self.sent = [prompt for prompt in self.sent if prompt[1] != group]

    def forget_snapshot(self, group: str) -> None:
        self.complete.discard(group)
        self.requested.discard(group)

    @rule(group=NAMES)
    def leave(self, group: str) -> None:
        self.index.remove_group(group)
        self.forget_sent(group)
        self.forget_snapshot(group)
        for known in (self.epochs, self.sequences, self.held):
            known.pop(group, None)

    @rule(group=NAMES, blocks=st.integers(0, len(CHAIN)))
    def send_prompt(self, group: str, blocks: int) -> None:
        self.count += 1
        self.index.add_expected(group, self.count, CHAIN[:blocks])
        if group in self.epochs:
            self.sent.append((self.count, group, blocks))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def remove_expected(self, data: st.DataObject) -> None:
        key, group, blocks = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.index.remove_expected(group, key)
        self.removed.append((key, group, blocks))

    @precondition(lambda self: self.removed)
    @rule(data=st.data())
    def remove_expected_too_late(self, data: st.DataObject) -> None:
        key, group, _ = data.draw(st.sampled_from(self.removed))
        self.index.remove_expected(group, key)

    @rule(group=NAMES, blocks=st.sets(st.tuples(st.integers(0, 5), TIERS)), first=st.booleans(), last=st.booleans())
    def send_chunk(self, group: str, blocks: set[tuple[int, Tier]], first: bool, last: bool) -> None:
        """A chunk of a snapshot. Events may have come since the chunk before, or that chunk may never have come."""
        if group not in self.epochs:
            return
        events = [stored(block, tier) for block, tier in sorted(blocks)]
        epoch, sequence = str(self.epochs[group]), self.sequences[group]
        chunk = SnapshotChunk(epoch=epoch, sequence=sequence, events=events, first=first, last=last)
        outcome = self.index.apply_snapshot(group, chunk)
        if first:
            self.held[group] = set()
            self.forget_snapshot(group)
        held = self.held[group]
        if held is None:
            expected = EventOutcome.IGNORED if group in self.requested else EventOutcome.SNAPSHOT_NEEDED
            self.requested.add(group)
        else:
            expected = EventOutcome.APPLIED
            held.update(blocks)
            (self.complete.add if last else self.complete.discard)(group)
        assert outcome is expected

    @rule(group=NAMES, events=st.lists(st.tuples(st.booleans(), st.integers(0, 5), TIERS), min_size=1, max_size=5))
    def send_events(self, group: str, events: list[tuple[bool, int, Tier]]) -> None:
        if group not in self.epochs:
            return
        messages = [stored(block, tier) if store else removed(block, tier) for store, block, tier in events]
        message = KvEvents(epoch=str(self.epochs[group]), sequence=self.sequences[group], events=messages)
        outcome = self.index.apply_events(group, message)
        self.sequences[group] += len(events)
        held = self.held[group]
        if held is None:
            assert outcome is EventOutcome.IGNORED
            return
        for store, block, tier in events:
            (held.add if store else held.discard)((block, tier))

    @rule(group=NAMES)
    def lose_some(self, group: str) -> None:
        if group in self.epochs:
            self.sequences[group] += 1
            message = KvEvents(epoch=str(self.epochs[group]), sequence=self.sequences[group], events=[stored(0)])
            expected = EventOutcome.IGNORED if self.held[group] is None else EventOutcome.SNAPSHOT_NEEDED
            assert self.index.apply_events(group, message) is expected
            if expected is EventOutcome.SNAPSHOT_NEEDED:
                self.requested.add(group)
            self.complete.discard(group)
            self.held[group] = None

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        expected = {}
        for group, held in self.held.items():
            counts = [0, 0, 0]
            coming = max((blocks for _, name, blocks in self.sent if name == group), default=0)
            for block in range(len(CHAIN)):
                if (block, TIER_DEVICE) in (held or ()):
                    counts[0] += 1
                elif (block, TIER_HOST) in (held or ()):
                    counts[1] += 1
                elif block < coming:
                    counts[2] += 1
                else:
                    break
            if any(counts):
                expected[group] = tuple(counts)
        assert matched_blocks(self.index, CHAIN) == expected
        assert {group for group in self.epochs if self.index.is_complete(group)} == self.complete
        assert self.index.entries == sum(len(held or ()) for held in self.held.values())


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=examples(30), deadline=None)
