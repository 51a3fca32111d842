"""PendingPrefixes: after any order of add, settle and forget, only those still open count."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.router.routing.pending_prefixes import PendingPrefix, PendingPrefixes

BITS = st.sampled_from([1, 2, 4])
BLOCKS = [bytes([number]) * 16 for number in range(4)]


class ExpectationsAgainstList(RuleBasedStateMachine):
    """The same calls on expectations and on a plain list of the open ones."""

    def __init__(self) -> None:
        super().__init__()
        self.expectations = PendingPrefixes()
        self.open: list[PendingPrefix] = []
        self.ended: list[PendingPrefix] = []  # settled or forgotten

    @rule(bit=BITS, blocks=st.integers(0, len(BLOCKS)))
    def add(self, bit: int, blocks: int) -> None:
        self.open.append(self.expectations.add(bit, BLOCKS[:blocks]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        expectation = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.expectations.settle(expectation)
        self.ended.append(expectation)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        self.expectations.settle(data.draw(st.sampled_from(self.ended)))

    @rule(bit=BITS)
    def forget(self, bit: int) -> None:
        self.expectations.forget(bit)
        self.ended += [expectation for expectation in self.open if expectation.bit == bit]
        self.open = [expectation for expectation in self.open if expectation.bit != bit]

    @invariant()
    def agrees(self) -> None:
        self.expectations.check()
        blocks = Counter((expectation.bit, block) for expectation in self.open for block in expectation.chain)
        where: dict[bytes, int] = {}
        for bit, block in blocks:
            where[block] = where.get(block, 0) | bit
        assert self.expectations.where == where and len(self.expectations) == len(blocks)


TestExpectations = ExpectationsAgainstList.TestCase
TestExpectations.settings = settings(max_examples=80, deadline=None)
