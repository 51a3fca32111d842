"""PrefixIndex: groups that come and leave, prompts that were sent to them, and very many of both."""

import time
from hashlib import blake2b

import pytest

from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    TIER_STATE,
    KvEvent,
    KvEvents,
    SnapshotChunk,
)
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from tests.router.routing.index_events import CHAIN, following, matched_blocks, removed, snapshot, stored

pytestmark = pytest.mark.usefixtures("slow_removal")


def test_a_sent_prompt_is_expected_until_it_is_removed() -> None:
    """Blocks of a sent prompt match as expected until events report them, or until the prompt is removed."""
    index = following("a")
    index.add_expected("a", 1, CHAIN[:3])
    assert matched_blocks(index, CHAIN) == {"a": (0, 0, 3)}
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(0), stored(1)]))
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 1)}
    index.remove_expected("a", 1)
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 0)}
    assert len(index.expected_blocks) == 0


def test_an_expected_prompt_ends_with_its_incarnation() -> None:
    """A prompt that was sent to an earlier incarnation is not expected of the next one, and removing it then changes
    nothing."""
    index = following("a")
    index.add_expected("a", 1, CHAIN)
    index.add_group("a", "2")
    assert matched_blocks(index, CHAIN) == {}
    index.add_expected("a", 2, CHAIN[:1])
    index.remove_expected("a", 1)
    index.check()
    assert matched_blocks(index, CHAIN) == {"a": (0, 0, 1)}
    index.add_expected("b", 3, CHAIN)
    assert len(index.expected_blocks) == 1


def test_a_hundred_groups_share_the_index() -> None:
    """The number of groups is not limited, and the bit of a removed group is used again."""
    names = [f"g{place}" for place in range(100)]
    index = following(*names)
    for name in names:
        index.apply_events(name, KvEvents(epoch="1", sequence=0, events=[stored(0)]))
    index.remove_group("g50")
    index.add_group("h", "1")
    index.check()
    assert set(matched_blocks(index, CHAIN)) == set(names) - {"g50"}


def test_a_hundred_groups_with_and_without_states_share_the_index() -> None:
    """Each group with states matches up to its own deepest snapshot, held or expected; the others match all blocks."""
    index = PrefixIndex()
    expected = {}
    for place in range(100):
        name, held, saved, later = f"g{place}", 1 + place % 6, place % 4, place % 5
        index.add_group(name, "1", keeps_states=place % 3 > 0)
        blocks = [stored(block) for block in range(held)]
        states = [stored(saved - 1, TIER_STATE)] if saved and place % 3 else []
        index.apply_snapshot(name, snapshot(*blocks, *states))
        index.add_expected(name, place, CHAIN[:5], later)
        start = saved if saved <= held else 0
        soon = max(later, saved)
        expected[name] = (start, 0, soon - start) if place % 3 else (held, 0, max(5 - held, 0))
    index.check()
    assert matched_blocks(index, CHAIN) == {name: blocks for name, blocks in expected.items() if any(blocks)}


def test_the_blocks_of_a_group_that_left_are_dropped_little_by_little() -> None:
    """A group that leaves matches nothing from then on, also if it attaches again meanwhile. Each message of any group
    drops some of its blocks, until none is left and its bit is free."""
    index = following("a", "b")
    index.apply_events("a", KvEvents(epoch="1", sequence=0, events=[stored(block) for block in range(6)]))
    on_device, _ = index._locations.groups_by_block
    index.remove_group("a")
    assert matched_blocks(index, CHAIN) == {} and index.entries == 0 and len(on_device) == 5
    assert index.add_group("a", "1") == 2, "slot 0 is not free yet"
    index.apply_snapshot("a", snapshot(stored(0)))
    assert matched_blocks(index, CHAIN) == {"a": (1, 0, 0)}
    for sequence in range(5):
        index.check()
        index.apply_events("b", KvEvents(epoch="1", sequence=sequence, events=[removed(0)]))
    assert len(on_device) == 1 and index.add_group("c", "1") == 0
    assert matched_blocks(index, CHAIN) == {"a": (1, 0, 0)}


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
    assert matched_blocks(index, CHAIN) == {"a": (0, 0, 2)}
    index.remove_expected("a", "new")
    index.remove_expected("a", "new")
    assert matched_blocks(index, CHAIN) == {}
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


def test_no_dict_of_the_index_holds_more_than_a_small_part_of_many_blocks() -> None:
    """A dict that grows stops every stream of the router while it copies its entries. So 200,000 blocks, of one group
    as of all, are divided into dicts of less than 1%, and every block is still found and removed."""
    index = PrefixIndex()
    index.add_group("a", "1")
    blocks = [blake2b(number.to_bytes(4, "big"), digest_size=16).digest() for number in range(200_000)]
    events = [KvEvent(stored=True, block_hash=block, tier=TIER_DEVICE) for block in blocks]
    for start in range(0, len(events), 1000):
        chunk = SnapshotChunk(epoch="1", first=not start, events=events[start : start + 1000])
        assert index.apply_snapshot("a", chunk) is EventOutcome.APPLIED
    index.check()
    (held,) = index._locations._held.values()
    on_device, _ = index._locations.groups_by_block
    for table in (held, on_device):
        assert set(table) == set(blocks)
        assert max(map(len, table.parts)) < len(blocks) / 100
    index.apply_snapshot("a", snapshot(events[0]))
    index.check()
    assert index.entries == 1 and len(on_device) >= len(blocks) - 2


def test_a_new_snapshot_drops_the_blocks_before_little_by_little() -> None:
    """A snapshot or a gap forgets all blocks of a group at once, without looking at each. The group keeps its slot, its
    expected blocks, and its place beside the other groups."""
    index = following("a", "b")
    for group in "ab":
        stores = [stored(block) for block in range(6)]
        assert index.apply_events(group, KvEvents(epoch="1", sequence=0, events=stores)) is EventOutcome.APPLIED
        index.add_expected(group, group, CHAIN[:4])
    on_device, _ = index._locations.groups_by_block
    index.apply_snapshot("a", snapshot(stored(0), stored(1), sequence=6))
    index.check()
    first = index._groups["a"].bit
    assert sum(bool(groups & 0b01) for _, groups in on_device.items()) == 4, "not all are dropped yet"
    assert matched_blocks(index, CHAIN) == {"a": (2, 0, 2), "b": (6, 0, 0)}
    assert index.match(CHAIN).device.tolist() == [2, 6]
    assert index.apply_events("a", KvEvents(epoch="1", sequence=9, events=[stored(5)])) is EventOutcome.SNAPSHOT_NEEDED
    assert index._groups["a"].bit not in (0b01, first)
    assert matched_blocks(index, CHAIN) == {"a": (0, 0, 4), "b": (6, 0, 0)}
    assert index.add_group("c", "1") not in (0, 1)
    index.remove_expected("a", "a")
    index.remove_group("b")
    index.check()
    assert matched_blocks(index, CHAIN) == {}
