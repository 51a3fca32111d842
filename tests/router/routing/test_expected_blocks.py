"""ExpectedBlocks: after any order of additions and removals, only the prompts that are still expected count."""

from itertools import count

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.router.routing.expected_blocks import ExpectedBlocks
from tests.examples import examples
from tests.router.routing.block_chains import CHAINS, chain_of

BITS = st.sampled_from([1, 2, 4])


class ExpectedBlocksAgainstSets(RuleBasedStateMachine):
    """The same calls on ExpectedBlocks and on a plain dict of the expected prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.expected_blocks = ExpectedBlocks()
        self.keys = count()
        self.open: dict[tuple[int, int], list[bytes]] = {}  # (group, key) -> blocks of the prompt
        self.ended: list[tuple[int, int]] = []

    @rule(bit=BITS, words=CHAINS)
    def add(self, bit: int, words: str) -> None:
        key = next(self.keys)
        self.open[bit, key] = chain_of(words)
        self.expected_blocks.add(bit, key, self.open[bit, key])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.open)))
        self.expected_blocks.remove(*prompt)
        del self.open[prompt]
        self.ended.append(prompt)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def remove_again(self, data: st.DataObject) -> None:
        self.expected_blocks.remove(*data.draw(st.sampled_from(self.ended)))

    @rule(bit=BITS)
    def remove_group(self, bit: int) -> None:
        self.expected_blocks.remove_group(bit)
        self.ended += [prompt for prompt in self.open if prompt[0] == bit]
        self.open = {prompt: chain for prompt, chain in self.open.items() if prompt[0] != bit}

    @rule(words=CHAINS)
    def match(self, words: str) -> None:
        """For each block of a chain: the groups with a prompt that contains it."""
        chain, found, begin = chain_of(words), list[int](), 0
        for end, groups in self.expected_blocks.match(chain):
            assert end > begin and groups
            found += [groups] * (end - begin)
            begin = end
        expecting = [{bit for (bit, _), prompt in self.open.items() if block in prompt} for block in chain]
        assert found == [sum(bits) for bits in expecting if bits]

    @invariant()
    def agrees(self) -> None:
        self.expected_blocks.check()
        pairs = {(bit, block) for (bit, _), chain in self.open.items() for block in chain}
        assert len(self.expected_blocks) == len(pairs)


TestExpectedBlocks = ExpectedBlocksAgainstSets.TestCase
TestExpectedBlocks.settings = settings(max_examples=examples(40), deadline=None)


def test_prompts_that_part_late_are_told_apart() -> None:
    """Of two long prompts that part at their last block but one, a third chain matches the one that it follows."""
    expected_blocks = ExpectedBlocks()
    for bit, words in ((1, "a" * 1000 + "bb"), (2, "a" * 1000 + "cc"), (4, "a" * 10)):
        expected_blocks.add(bit, words, chain_of(words))
    assert expected_blocks.match(chain_of("a" * 1000 + "cb")) == [(10, 7), (1000, 3), (1001, 2)]
    expected_blocks.remove(4, "a" * 10)
    assert expected_blocks.match(chain_of("a" * 1000 + "b")) == [(1000, 3), (1001, 1)]
    assert len(expected_blocks) == 2 * 1002
    expected_blocks.check()
