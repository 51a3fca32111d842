"""match_chain(): compared with a loop over groups and blocks, for any sets of groups."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.router.routing.expected_blocks import ExpectedBlocks
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.routing.prefix_match import PrefixMatches, match_chain
from coatcheck.router.routing.split_table import SplitTable
from tests.examples import examples
from tests.router.routing.block_chains import chain_of

pytestmark = pytest.mark.usefixtures("early_split")

SLOTS = 70  # more than a machine word has bits


def match_one_by_one(
    chain: list[bytes], slot: int, on_device: dict[bytes, int], on_host: dict[bytes, int], expected: int
) -> tuple[int, int, int]:
    """The blocks of one group, of which it expects the first `expected`."""
    device = host = coming = 0
    for depth, block in enumerate(chain):
        if on_device.get(block, 0) >> slot & 1:
            device += 1
        elif on_host.get(block, 0) >> slot & 1:
            host += 1
        elif depth < expected:
            coming += 1
        else:
            break
    return device, host, coming


def rows(matches: PrefixMatches) -> list[tuple[float, ...]]:
    """The match of each slot."""
    return list(zip(*(blocks.tolist() for blocks in matches), strict=True))


def table_of(sets: dict[bytes, int]) -> SplitTable:
    """The same mapping as a table."""
    table = SplitTable()
    for block, groups in sets.items():
        table.by_first_byte[block[0]][block] = groups
    table.split_if_large()
    return table


def gaps_of(chain: list[bytes], sets: dict[bytes, int]) -> dict[bytes, int]:
    """The blocks before a block that groups hold, with those of these groups that do not hold the block before."""
    gaps = {}
    for parent, block in pairwise(chain):
        if groups := sets.get(block, 0) & ~sets.get(parent, 0):
            gaps[parent] = groups
    return gaps


def match(
    chain: list[bytes], alive: int, on_device: dict[bytes, int], on_host: dict[bytes, int], prompts: ExpectedBlocks
) -> PrefixMatches:
    """match_chain with the gaps that these sets have."""
    either = {block: on_device.get(block, 0) | on_host.get(block, 0) for block in chain}
    gaps = table_of(gaps_of(chain, on_device)), table_of(gaps_of(chain, either))
    return match_chain(chain, alive, table_of(on_device), table_of(on_host), prompts.match(chain), *gaps)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 60), st.integers(0, 1 << 30), st.sampled_from([0.5, 0.9, 0.99, 1.0]), st.booleans())
def test_bisection_finds_what_a_loop_over_groups_finds(blocks: int, seed: int, held: float, alike: bool) -> None:
    """Blocks on devices, on hosts and in flight, with gaps anywhere; sets of groups that are equal are the same object
    or not; slots without a group match nothing."""
    rng = random.Random(seed)
    chain = chain_of("a" * blocks)
    slots = rng.choice([1, 3, 8, SLOTS])
    alive = rng.getrandbits(slots)
    on_device, on_host = dict[bytes, int](), dict[bytes, int]()
    for tier in (on_device, on_host):
        first, last = sorted(rng.choices(range(blocks + 1), k=2))
        usual = rng.getrandbits(slots)
        for block in chain[first:last]:
            chosen = usual if rng.random() < held else rng.getrandbits(slots)
            tier[block] = chosen if alike else chosen + (1 << 100) - (1 << 100)  # equal, and another object
    prompts = ExpectedBlocks()
    lengths = [rng.randint(0, blocks) if rng.random() < 0.3 else 0 for _ in range(slots)]
    for slot, length in enumerate(lengths):
        prompts.add(1 << slot, slot, chain[:length])
    found = rows(match(chain, alive, on_device, on_host, prompts))
    by_slot = [match_one_by_one(chain, slot, on_device, on_host, lengths[slot]) for slot in range(slots)]
    assert found == [by_slot[slot] if alive >> slot & 1 else (0, 0, 0) for slot in range(alive.bit_length())]


def test_a_long_prefix_takes_few_lookups() -> None:
    """Of a chain of 6,250 blocks that two groups hold for different lengths, fewer than a hundred are looked up."""
    chain = chain_of("a" * 6250)
    table = CountingTable()
    for depth, block in enumerate(chain[:5000]):
        table.by_first_byte[block[0]][block] = 0b11 if depth < 3000 else 0b01
    assert rows(match_chain(chain, 0b11, table, SplitTable(), [], SplitTable(), SplitTable())) == [
        (5000, 0, 0),
        (3000, 0, 0),
    ]
    assert 0 < table.lookups < 100


class CountingTable(SplitTable):
    """Counts the blocks that are looked up."""

    lookups = 0

    def get(self, block: bytes, default: int = 0) -> int:
        self.lookups += 1
        return super().get(block, default)


def test_no_chain_and_no_group_match_nothing() -> None:
    """An empty chain matches no block on any group, and without groups there is no slot."""
    assert rows(match_chain([], 0b101, SplitTable(), SplitTable(), [], SplitTable(), SplitTable())) == [(0, 0, 0)] * 3
    assert (
        rows(
            match_chain(
                chain_of("aa"), 0, table_of({chain_of("a")[0]: 1}), SplitTable(), [], SplitTable(), SplitTable()
            )
        )
        == []
    )


def test_a_slot_is_used_again() -> None:
    """The lowest free slot goes to the next group, and matches are in the order of slots."""
    index = PrefixIndex()
    assert [index.add_group(name, "1") for name in "abc"] == [0, 1, 2]
    index.remove_group("b")
    assert [index.add_group(name, "1") for name in ("d", "e", "c")] == [1, 3, 2]
    index.add_expected("c", 1, chain_of("aa"))
    assert rows(index.match(chain_of("aaa"))) == [(0, 0, 0), (0, 0, 0), (0, 0, 2), (0, 0, 0)]
    index.check()
