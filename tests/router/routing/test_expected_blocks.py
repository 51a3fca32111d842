"""ExpectedBlocks: after any order of additions and removals, only the prompts that are still expected count."""

from collections import Counter
from itertools import count

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.router.routing.expected_blocks import ExpectedBlocks
from tests.examples import examples

BITS = st.sampled_from([1, 2, 4])
BLOCKS = [bytes([number]) * 16 for number in range(4)]


class ExpectedBlocksAgainstDict(RuleBasedStateMachine):
    """The same calls on ExpectedBlocks and on a plain dict of the expected prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.expected_blocks = ExpectedBlocks()
        self.keys = count()
        self.open: dict[tuple[int, int], int] = {}  # (group, key) -> blocks of the prompt
        self.ended: list[tuple[int, int]] = []

    @rule(bit=BITS, blocks=st.integers(0, len(BLOCKS)))
    def add(self, bit: int, blocks: int) -> None:
        key = next(self.keys)
        self.expected_blocks.add(bit, key, BLOCKS[:blocks])
        self.open[bit, key] = blocks

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
        self.open = {prompt: blocks for prompt, blocks in self.open.items() if prompt[0] != bit}

    @invariant()
    def agrees(self) -> None:
        self.expected_blocks.check()
        blocks = Counter((bit, block) for (bit, _), count in self.open.items() for block in BLOCKS[:count])
        groups_by_block: dict[bytes, int] = {}
        for bit, block in blocks:
            groups_by_block[block] = groups_by_block.get(block, 0) | bit
        assert self.expected_blocks.groups_by_block == groups_by_block and len(self.expected_blocks) == len(blocks)


TestExpectedBlocks = ExpectedBlocksAgainstDict.TestCase
TestExpectedBlocks.settings = settings(max_examples=examples(25), deadline=None)
