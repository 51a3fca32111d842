"""PrefixIndex: compared with a model of plain sets, and its answers to wrong events."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    TIER_HOST,
    TIER_UNSPECIFIED,
    KvEvent,
    KvEvents,
    SnapshotChunk,
    Tier,
)
from coatcheck.router.routing import prefix_index
from coatcheck.router.routing.block_locations import EventProblem
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from tests.examples import examples

CHAIN = [bytes([block]) * 16 for block in range(6)]
TIERS = st.sampled_from([TIER_DEVICE, TIER_HOST])
NAMES = st.sampled_from(["a", "b", "c"])


@pytest.fixture(autouse=True)
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a group that has left are dropped one by one."""
    monkeypatch.setattr(prefix_index, "_REMOVED_BLOCKS", 1)


def stored(block: int, tier: Tier = TIER_DEVICE) -> KvEvent:
    """An event: the group has stored the block."""
    return KvEvent(stored=True, block_hash=CHAIN[block], tier=tier)


def removed(block: int, tier: Tier = TIER_DEVICE) -> KvEvent:
    """An event: the group has removed the block."""
    return KvEvent(stored=False, block_hash=CHAIN[block], tier=tier)


def snapshot(*events: KvEvent, epoch: str = "1", sequence: int = 0) -> SnapshotChunk:
    """A snapshot in one chunk."""
    return SnapshotChunk(epoch=epoch, sequence=sequence, events=events, first=True, last=True)


def following(*groups: str) -> PrefixIndex:
    """An index with empty snapshots of these groups."""
    index = PrefixIndex()
    for group in groups:
        index.add_group(group, "1")
        assert index.apply_snapshot(group, snapshot()) is EventOutcome.APPLIED
    return index


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
        assert self.index.matched_blocks(CHAIN) == expected
        assert {group for group in self.epochs if self.index.is_complete(group)} == self.complete
        assert self.index.entries == sum(len(held or ()) for held in self.held.values())


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=examples(30), deadline=None)


def test_a_chain_matches_only_without_a_break() -> None:
    """A group that holds the third block and not the second has one block of the prefix."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0), stored(2)]))
    assert index.matched_blocks(CHAIN) == {"a": (1, 0, 0)}


def test_leaving_the_device_does_not_erase_the_host() -> None:
    """A block that is demoted stays matched, as one of the host's."""
    index = following("a")
    events = [stored(0), stored(1), stored(1, TIER_HOST), removed(1)]
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=events))
    assert index.matched_blocks(CHAIN) == {"a": (1, 1, 0)}


def test_an_older_epoch_changes_nothing() -> None:
    """Events of an earlier incarnation are counted and ignored."""
    index = following("a")
    index.add_group("a", "2")
    index.apply_snapshot("a", snapshot(stored(0), epoch="2"))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[removed(0)])) is EventOutcome.IGNORED
    assert index.apply_snapshot("a", snapshot(epoch="1")) is EventOutcome.IGNORED
    assert index.matched_blocks(CHAIN) == {"a": (1, 0, 0)}
    assert index.problems == {EventProblem.OTHER_EPOCH: 1}


def test_an_unknown_group_changes_nothing() -> None:
    """Events of a group that has not registered, or has left, are ignored."""
    index = following("a")
    assert index.apply_events("b", KvEvents(epoch="1", sequence=0, events=[stored(0)])) is EventOutcome.IGNORED
    assert index.apply_snapshot("b", snapshot(stored(0))) is EventOutcome.IGNORED
    assert index.matched_blocks(CHAIN) == {} and index.problems == {EventProblem.UNKNOWN_GROUP: 2}


def test_events_that_were_seen_are_not_applied_twice() -> None:
    """A repeated message is ignored; of an overlapping one only the new events are applied."""
    index = following("a")
    both = [stored(0), removed(0), stored(1)]
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both[:2]))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both[:1])) is EventOutcome.IGNORED
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both)) is EventOutcome.APPLIED
    assert index.matched_blocks(CHAIN) == {} and index.entries == 1
    assert index.problems == {EventProblem.REPEATED: 1}


def test_after_a_gap_no_block_matches_until_a_snapshot() -> None:
    """A gap in the events removes the group's blocks. Later events are counted and ignored until a snapshot."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=2, events=[stored(1)])) is EventOutcome.SNAPSHOT_NEEDED
    assert index.apply_events("a", KvEvents(epoch="1", sequence=3, events=[stored(2)])) is EventOutcome.IGNORED
    assert index.matched_blocks(CHAIN) == {} and index.entries == 0
    assert index.problems == {EventProblem.GAP: 1, EventProblem.BEFORE_SNAPSHOT: 1}
    index.apply_snapshot("a", snapshot(stored(0), sequence=4))
    assert index.matched_blocks(CHAIN) == {"a": (1, 0, 0)}


def test_a_snapshot_without_its_first_chunk_is_requested_again() -> None:
    """A chunk whose predecessor or whose earlier events are missing adds no block. A snapshot is then requested once:
    the chunks that follow are of the one that was lost. A new first chunk counts."""
    index = PrefixIndex()
    index.add_group("a", "1")
    chunk = SnapshotChunk(epoch="1", sequence=5, events=[stored(0)], last=True)
    assert index.apply_snapshot("a", chunk) is EventOutcome.SNAPSHOT_NEEDED
    assert index.apply_snapshot("a", chunk) is EventOutcome.IGNORED
    assert index.apply_snapshot("a", snapshot(stored(0), sequence=4)) is EventOutcome.APPLIED
    assert index.apply_snapshot("a", chunk) is EventOutcome.SNAPSHOT_NEEDED, "event 4 is missing"
    assert index.matched_blocks(CHAIN) == {} and not index.is_complete("a")
    assert index.problems == {EventProblem.GAP: 2, EventProblem.BEFORE_SNAPSHOT: 1}


def test_a_prefix_matches_as_soon_as_its_chunk_has_come() -> None:
    """The first chunk removes what the index had; each chunk counts at once, between events."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    chunk = SnapshotChunk(epoch="1", sequence=1, events=[stored(0), stored(1)], first=True)
    index.apply_snapshot("a", chunk)
    assert index.matched_blocks(CHAIN) == {"a": (2, 0, 0)} and not index.is_complete("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=1, events=[removed(1)]))
    index.apply_snapshot("a", SnapshotChunk(epoch="1", sequence=2, events=[stored(1, TIER_HOST)], last=True))
    assert index.matched_blocks(CHAIN) == {"a": (1, 1, 0)} and index.is_complete("a")


@given(st.sampled_from([TIER_UNSPECIFIED, 7]), st.booleans())
def test_an_event_of_no_tier_is_counted_and_ignored(tier: int, store: bool) -> None:
    """An event with an unknown tier changes nothing."""
    index = following("a")
    event = KvEvent(stored=store, block_hash=CHAIN[0], tier=tier)  # type: ignore[arg-type]  # on purpose
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[event]))
    index.check()
    assert index.matched_blocks(CHAIN) == {} and index.problems == {EventProblem.MALFORMED: 1}


def test_a_sent_prompt_is_expected_until_it_is_removed() -> None:
    """Blocks of a sent prompt match as expected until events report them, or until the prompt is removed."""
    index = following("a")
    index.add_expected("a", 1, CHAIN[:3])
    assert index.matched_blocks(CHAIN) == {"a": (0, 0, 3)}
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0), stored(1)]))
    assert index.matched_blocks(CHAIN) == {"a": (2, 0, 1)}
    index.remove_expected("a", 1)
    assert index.matched_blocks(CHAIN) == {"a": (2, 0, 0)}
    assert len(index.expected_blocks) == 0


def test_an_expected_prompt_ends_with_its_incarnation() -> None:
    """A prompt that was sent to an earlier incarnation is not expected of the next one, and removing it then changes
    nothing."""
    index = following("a")
    index.add_expected("a", 1, CHAIN)
    index.add_group("a", "2")
    assert index.matched_blocks(CHAIN) == {}
    index.add_expected("a", 2, CHAIN[:1])
    index.remove_expected("a", 1)
    index.check()
    assert index.matched_blocks(CHAIN) == {"a": (0, 0, 1)}
    index.add_expected("b", 3, CHAIN)
    assert len(index.expected_blocks) == 1


def test_a_block_without_its_parent_is_counted_and_matches_nothing() -> None:
    """A block without its parent matches nothing, and matches once the parent is stored."""
    index = following("a")
    orphan = KvEvent(stored=True, block_hash=CHAIN[1], parent_hash=CHAIN[0], tier=TIER_DEVICE)
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[orphan]))
    assert index.matched_blocks(CHAIN) == {} and index.problems == {EventProblem.NO_PARENT: 1}
    index.apply_events("a", KvEvents(epoch="1", sequence=1, events=[stored(0)]))
    assert index.matched_blocks(CHAIN) == {"a": (2, 0, 0)}


@pytest.mark.parametrize("name", [b"", b"short", bytes(17)])
def test_a_block_hash_of_another_length_is_counted_and_ignored(name: bytes) -> None:
    """A block hash has 16 bytes."""
    index = following("a")
    index.apply_events(
        "a", KvEvents(epoch="1", sequence=0, events=[KvEvent(stored=True, block_hash=name, tier=TIER_DEVICE)])
    )
    assert index.problems == {EventProblem.MALFORMED: 1} and index.entries == 0


@pytest.mark.parametrize("by", ["events", "snapshot"])
def test_a_group_that_reports_more_blocks_than_it_registered_is_dropped(by: str) -> None:
    """The blocks that a group has registered bound the memory that its events take."""
    index = PrefixIndex()
    index.add_group("a", "1", capacity=2)
    index.apply_snapshot("a", snapshot(stored(0), stored(1)))
    if by == "events":
        outcome = index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(2)]))
    else:
        outcome = index.apply_snapshot("a", snapshot(stored(0), stored(1), stored(2)))
    assert outcome is EventOutcome.IMPOSSIBLE and index.problems == {EventProblem.IMPOSSIBLE: 1}
    assert index.matched_blocks(CHAIN) == {} and index.entries == 0


def test_a_hundred_groups_share_the_index() -> None:
    """The number of groups is not limited, and the bit of a removed group is used again."""
    names = [f"g{place}" for place in range(100)]
    index = following(*names)
    for name in names:
        index.apply_events(name, KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    index.remove_group("g50")
    index.add_group("h", "1")
    index.check()
    assert set(index.matched_blocks(CHAIN)) == set(names) - {"g50"}


def test_the_blocks_of_a_group_that_left_are_dropped_little_by_little() -> None:
    """A group that leaves matches nothing from then on, also if it attaches again meanwhile. Each message of any group
    drops some of its blocks, until none is left and its bit is free."""
    index = following("a", "b")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(block) for block in range(6)]))
    on_device, _ = index._locations.groups_by_block
    index.remove_group("a")
    assert index.matched_blocks(CHAIN) == {} and index.entries == 0 and len(on_device) == 5
    assert index.add_group("a", "1") == 2, "slot 0 is not free yet"
    index.apply_snapshot("a", snapshot(stored(0)))
    assert index.matched_blocks(CHAIN) == {"a": (1, 0, 0)}
    for sequence in range(5):
        index.check()
        index.apply_events("b", KvEvents(epoch="1", sequence=sequence, events=[removed(0)]))
    assert len(on_device) == 1 and index.add_group("c", "1") == 0
    assert index.matched_blocks(CHAIN) == {"a": (1, 0, 0)}


def test_removing_after_the_same_process_attached_again_changes_nothing() -> None:
    """A stream that breaks and attaches again keeps the group's epoch: removing a prompt of the old stream changes
    nothing, and a prompt of the new one stays expected."""
    index = following("a")
    index.add_expected("a", "old", CHAIN[:3])
    index.remove_group("a")
    index.add_group("a", "1")
    index.remove_expected("a", "old")
    index.add_expected("a", "new", CHAIN[:2])
    index.remove_expected("a", "old")
    assert index.matched_blocks(CHAIN) == {"a": (0, 0, 2)}
    index.remove_expected("a", "new")
    index.remove_expected("a", "new")
    assert index.matched_blocks(CHAIN) == {}
    index.check()


def event_seconds(held: int, replaced: int) -> float:
    """Mean CPU seconds of an event, while a group of `held` blocks replaces its oldest block `replaced` times."""

    def event(block: int, *, is_stored: bool) -> KvEvent:
        return KvEvent(stored=is_stored, block_hash=block.to_bytes(16, "big"), tier=TIER_DEVICE)

    index = PrefixIndex()
    index.add_group("a", "1")
    index.apply_snapshot("a", snapshot(*[event(block, is_stored=True) for block in range(held)]))
    seconds, batch = 0.0, 1000
    for first in range(0, replaced, batch):
        pairs = [(event(n + held, is_stored=True), event(n, is_stored=False)) for n in range(first, first + batch)]
        message = KvEvents(epoch="1", sequence=2 * first, events=[one for pair in pairs for one in pair])
        began = time.thread_time()
        assert index.apply_events("a", message) is EventOutcome.APPLIED
        seconds += time.thread_time() - began
    assert index.entries == held
    return seconds / (2 * replaced)


def test_an_event_takes_as_long_in_a_large_index() -> None:
    """Events do not take longer the more blocks there are, or have left before. A plain dict that gives its first key,
    after deletions at its front, made this 13 times as long; caches of the processor make it about twice as long."""
    few = max(event_seconds(1000, 20_000) for _ in range(2))
    assert event_seconds(200_000, 200_000) < 6 * few
