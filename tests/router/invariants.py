"""Invariants of the router's indexes and queues. Each function raises AssertionError if one is broken."""

from collections import Counter
from typing import Any

from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.serving.fair_queue import FairQueue


def check_index(index: PrefixIndex) -> None:
    """Each group has its own bit. The groups of each block, the blocks of each group and the counts agree."""
    assert index._live == sum(member.bit for member in index._groups.values()), "each group has a bit of its own"
    assert index._names == {member.bit: name for name, member in index._groups.items()}
    locations, pending = index._locations, index.pending
    for place, where in enumerate(locations.where):
        expected: dict[bytes, int] = {}
        for bit, held in locations._held.items():
            for block, tiers in held.items():
                assert tiers, "a block in no tier"
                if tiers >> place & 1:
                    expected[block] = expected.get(block, 0) | bit
        assert where == expected, "the sets of groups and the groups' own blocks disagree"
    for bit, held in locations._held.items():
        assert locations._entries[bit] == sum(tiers.bit_count() for tiers in held.values()), "entries miscounted"
    assert locations._entries.keys() <= locations._held.keys(), "entries of a group that holds nothing"
    expected = {}
    assert pending._chains.keys() == pending._counts.keys(), "groups with prompts and groups with counts differ"
    for bit, counts in pending._counts.items():
        blocks = Counter(block for chain in pending._chains[bit].values() for block in chain)
        assert counts == blocks, "a block's count differs from the number of prompts that contain it"
        for block in counts:
            expected[block] = expected.get(block, 0) | bit
    assert expected == pending.where, "the shared index and the groups' counts disagree"


def check_load(load: GroupLoad) -> None:
    """The sums over submissions that no report contains are right, and these are in the stream's order."""
    unreported = load._unreported.values()
    assert load._unreported_tokens == sum(one.tokens for one in unreported), "sum of unreported tokens"
    assert load._unreported_choices == sum(one.choices for one in unreported), "sum of unreported choices"
    assert all(one.choices for one in unreported), "a submission whose choices have all ended is still counted"
    numbers = list(load._unreported)
    assert numbers == sorted(numbers) and max(numbers, default=0) <= load._submissions, "order of the stream"


def check_queue(queue: FairQueue[Any]) -> None:
    """Counts by class are right. Each request is once in order of age and once in its class, in order of due times."""
    queues = [waiting for share in queue._shares.values() for waiting in share.queues.values()]
    classes = Counter(entry.scheduling_class for waiting in queues for entry in waiting.by_age.values())
    assert queue._classes == classes, "counts by class"
    for waiting in queues:
        assert waiting.by_age, "an empty queue"
        assert list(waiting.by_age) == sorted(waiting.by_age), "order of age"
        ordered = sorted((entry.due, id, entry) for id, entry in waiting.by_age.items())
        assert ordered == sorted(place for places in waiting.by_class.values() for place in places)
        for own_class, places in waiting.by_class.items():
            assert places == sorted(places), "order of due times"
            assert {entry.scheduling_class for _, _, entry in places} == {own_class}
