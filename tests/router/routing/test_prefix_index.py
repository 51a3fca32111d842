"""PrefixIndex: events and snapshots, and its answers to wrong ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    TIER_HOST,
    TIER_STATE,
    TIER_UNSPECIFIED,
    KvEvent,
    KvEvents,
    SnapshotChunk,
)
from coatcheck.router.routing.block_locations import EventProblem
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from tests.router.routing.index_events import CHAIN, following, matched_blocks, removed, snapshot, stored

pytestmark = pytest.mark.usefixtures("slow_removal")


def test_a_chain_matches_only_without_a_break() -> None:
    """A group that holds the third block and not the second has one block of the prefix."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0), stored(2)]))
    assert matched_blocks(index, CHAIN) == {"a": (1, 0, 0)}


def test_removals_without_a_parent_create_no_prefix() -> None:
    """A group that does not name the parents of removed blocks matches what it holds and no more. Once the missing
    parents cannot be told from gaps in what the group holds, a snapshot is requested."""
    index = following("a")
    stores = [stored(block) for block in range(6)]
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=stores))
    nameless = [KvEvent(stored=False, block_hash=CHAIN[block], tier=TIER_DEVICE) for block in range(6)]
    assert index.apply_events("a", KvEvents(epoch="1", sequence=6, events=nameless[5:])) is EventOutcome.APPLIED
    assert matched_blocks(index, CHAIN) == {"a": (5, 0, 0)} and not any(index._locations.gaps)
    assert index.apply_events("a", KvEvents(epoch="1", sequence=7, events=nameless[4:5])) is EventOutcome.APPLIED
    assert matched_blocks(index, CHAIN) == {"a": (4, 0, 0)} and any(index._locations.gaps)
    assert index.apply_events("a", KvEvents(epoch="1", sequence=8, events=nameless[2:3])) is EventOutcome.APPLIED
    index.check()
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 0)}
    message = KvEvents(epoch="1", sequence=9, events=nameless[:1])
    assert index.apply_events("a", message) is EventOutcome.SNAPSHOT_NEEDED
    index.apply_snapshot("a", snapshot(*stores, sequence=10))
    assert matched_blocks(index, CHAIN) == {"a": (6, 0, 0)}


def test_events_that_contradict_each_other_leave_the_index_consistent() -> None:
    """A block that is its own parent, and parents that change between the events of a block."""
    index = following("a")
    own = KvEvent(stored=True, block_hash=CHAIN[0], parent_hash=CHAIN[0], tier=TIER_DEVICE)
    other = KvEvent(stored=True, block_hash=CHAIN[2], parent_hash=CHAIN[0], tier=TIER_HOST)
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[own, stored(1), other, stored(2)]))
    index.check()
    for block, tier in ((2, TIER_HOST), (2, TIER_DEVICE), (1, TIER_DEVICE), (0, TIER_DEVICE)):
        sequence = index._groups["a"].next_sequence
        index.apply_events("a", KvEvents(epoch="1", sequence=sequence, events=[removed(block, tier)]))
        index.check()
    assert index.entries == 0 and matched_blocks(index, CHAIN) == {}


def test_leaving_the_device_does_not_erase_the_host() -> None:
    """A block that is demoted stays matched, as one of the host's."""
    index = following("a")
    events = [stored(0), stored(1), stored(1, TIER_HOST), removed(1)]
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=events))
    assert matched_blocks(index, CHAIN) == {"a": (1, 1, 0)}


def test_an_older_epoch_changes_nothing() -> None:
    """Events of an earlier incarnation are counted and ignored."""
    index = following("a")
    index.add_group("a", "2")
    index.apply_snapshot("a", snapshot(stored(0), epoch="2"))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[removed(0)])) is EventOutcome.IGNORED
    assert index.apply_snapshot("a", snapshot(epoch="1")) is EventOutcome.IGNORED
    assert matched_blocks(index, CHAIN) == {"a": (1, 0, 0)}
    assert index.problems == {EventProblem.OTHER_EPOCH: 1}


def test_an_unknown_group_changes_nothing() -> None:
    """Events of a group that has not registered, or has left, are ignored."""
    index = following("a")
    assert index.apply_events("b", KvEvents(epoch="1", sequence=0, events=[stored(0)])) is EventOutcome.IGNORED
    assert index.apply_snapshot("b", snapshot(stored(0))) is EventOutcome.IGNORED
    assert matched_blocks(index, CHAIN) == {} and index.problems == {EventProblem.UNKNOWN_GROUP: 2}


def test_events_that_were_seen_are_not_applied_twice() -> None:
    """A repeated message is ignored; of an overlapping one only the new events are applied."""
    index = following("a")
    both = [stored(0), removed(0), stored(1)]
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both[:2]))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both[:1])) is EventOutcome.IGNORED
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=both)) is EventOutcome.APPLIED
    assert matched_blocks(index, CHAIN) == {} and index.entries == 1
    assert index.problems == {EventProblem.REPEATED: 1, EventProblem.NO_PARENT: 1}


def test_after_a_gap_no_block_matches_until_a_snapshot() -> None:
    """A gap in the events removes the group's blocks. Later events are counted and ignored until a snapshot."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    assert index.apply_events("a", KvEvents(epoch="1", sequence=2, events=[stored(1)])) is EventOutcome.SNAPSHOT_NEEDED
    assert index.apply_events("a", KvEvents(epoch="1", sequence=3, events=[stored(2)])) is EventOutcome.IGNORED
    assert matched_blocks(index, CHAIN) == {} and index.entries == 0
    assert index.problems == {EventProblem.GAP: 1, EventProblem.BEFORE_SNAPSHOT: 1}
    index.apply_snapshot("a", snapshot(stored(0), sequence=4))
    assert matched_blocks(index, CHAIN) == {"a": (1, 0, 0)}


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
    assert matched_blocks(index, CHAIN) == {} and not index.is_complete("a")
    assert index.problems == {EventProblem.GAP: 2, EventProblem.BEFORE_SNAPSHOT: 1}


def test_a_prefix_matches_as_soon_as_its_chunk_has_come() -> None:
    """The first chunk removes what the index had; each chunk counts at once, between events."""
    index = following("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    chunk = SnapshotChunk(epoch="1", sequence=1, events=[stored(0), stored(1)], first=True)
    index.apply_snapshot("a", chunk)
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 0)} and not index.is_complete("a")
    index.apply_events("a", KvEvents(epoch="1", sequence=1, events=[removed(1)]))
    index.apply_snapshot("a", SnapshotChunk(epoch="1", sequence=2, events=[stored(1, TIER_HOST)], last=True))
    assert matched_blocks(index, CHAIN) == {"a": (1, 1, 0)} and index.is_complete("a")


@given(st.sampled_from([TIER_UNSPECIFIED, 7]), st.booleans())
def test_an_event_of_no_tier_is_counted_and_ignored(tier: int, store: bool) -> None:
    """An event with an unknown tier changes nothing."""
    index = following("a")
    event = KvEvent(stored=store, block_hash=CHAIN[0], tier=tier)  # type: ignore[arg-type]  # on purpose
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[event]))
    index.check()
    assert matched_blocks(index, CHAIN) == {} and index.problems == {EventProblem.MALFORMED: 1}


def test_a_block_without_its_parent_is_counted_and_matches_nothing() -> None:
    """A block without its parent matches nothing, and matches once the parent is stored."""
    index = following("a")
    orphan = KvEvent(stored=True, block_hash=CHAIN[1], parent_hash=CHAIN[0], tier=TIER_DEVICE)
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[orphan]))
    assert matched_blocks(index, CHAIN) == {} and index.problems == {EventProblem.NO_PARENT: 1}
    index.apply_events("a", KvEvents(epoch="1", sequence=1, events=[stored(0)]))
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 0)}


@pytest.mark.parametrize("name", [b"", b"short", bytes(17)])
def test_a_block_hash_of_another_length_is_counted_and_ignored(name: bytes) -> None:
    """A block hash has 16 bytes."""
    index = following("a")
    index.apply_events(
        "a", KvEvents(epoch="1", sequence=0, events=[KvEvent(stored=True, block_hash=name, tier=TIER_DEVICE)])
    )
    assert index.problems == {EventProblem.MALFORMED: 1} and index.entries == 0
    states = PrefixIndex()
    states.add_group("a", "1", keeps_states=True)
    states.apply_snapshot("a", snapshot(KvEvent(stored=True, block_hash=name, tier=TIER_STATE)))
    assert states.problems == {EventProblem.MALFORMED: 1} and not states.state_locations.count_held(0)


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
    assert matched_blocks(index, CHAIN) == {} and index.entries == 0


def test_a_group_that_reports_more_snapshots_of_states_than_blocks_is_dropped() -> None:
    """They bound the memory of its snapshots too: a group has no more of them than blocks."""
    index = PrefixIndex()
    index.add_group("a", "1", capacity=2, keeps_states=True)
    index.apply_snapshot("a", snapshot(stored(0, TIER_STATE), stored(1, TIER_STATE)))
    moved = [removed(0, TIER_STATE), stored(2, TIER_STATE)]
    assert index.apply_events("a", KvEvents(epoch="1", sequence=0, events=moved)) is EventOutcome.APPLIED
    more = KvEvents(epoch="1", sequence=2, events=[stored(3, TIER_STATE)])
    assert index.apply_events("a", more) is EventOutcome.IMPOSSIBLE
    assert not index.state_locations.count_held(0)
    index.check()
