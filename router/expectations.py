"""Expectations: the blocks of prompts that this router has sent and whose group has not told of them yet.

By the time that a prompt sent now is computed they will be there, so a burst of one session goes to one group. Groups
are bits here, as in the prefix index. Bits are used again: another group may get the bit of a group that left, and so
may the same group when it attaches again. So an expectation ends only once, when it is settled or when its group is
forgotten; settling it after that changes nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """One prompt on its way to one group, on one attachment of that group. Equal to itself only."""

    bit: int
    chain: Sequence[bytes]


class Expectations:
    """`where[block]` are the groups, as bits, to which a prompt with that block is on its way."""

    def __init__(self) -> None:
        self.where: dict[bytes, int] = {}
        self._counts: dict[int, dict[bytes, int]] = {}  # group -> block -> open expectations that have it
        self._open: dict[int, set[Expectation]] = {}  # group -> those neither settled nor forgotten

    def __len__(self) -> int:
        """Blocks by group."""
        return sum(map(len, self._counts.values()))

    def add(self, bit: int, chain: Sequence[bytes]) -> Expectation:
        """A prompt goes to the group: its blocks are expected there until `settle` or `forget`."""
        expectation = Expectation(bit, chain)
        self._open.setdefault(bit, set()).add(expectation)
        counts, where = self._counts.setdefault(bit, {}), self.where
        for block in chain:
            if count := counts.get(block, 0):
                counts[block] = count + 1
            else:
                counts[block] = 1
                where[block] = where.get(block, 0) | bit
        return expectation

    def settle(self, expectation: Expectation) -> None:
        """The prompt is computed, or never will be. Changes nothing if it was settled or forgotten before."""
        bit = expectation.bit
        still_open = self._open.get(bit)
        if still_open is None or expectation not in still_open:
            return
        still_open.remove(expectation)
        counts = self._counts[bit]
        for block in expectation.chain:
            if (count := counts[block]) > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                self._unset(bit, block)

    def forget(self, bit: int) -> None:
        """The group is gone, and all that went there."""
        self._open.pop(bit, None)
        for block in self._counts.pop(bit, ()):
            self._unset(bit, block)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        expected: dict[bytes, int] = {}
        assert self._open.keys() == self._counts.keys(), "open expectations and their blocks are of the same groups"
        for bit, counts in self._counts.items():
            blocks = Counter(block for expectation in self._open[bit] for block in expectation.chain)
            assert counts == blocks, "each block is counted once for each open expectation that has it"
            assert all(expectation.bit == bit for expectation in self._open[bit]), "an expectation of another group"
            for block in counts:
                expected[block] = expected.get(block, 0) | bit
        assert expected == self.where, "the shared expectations and the groups' own disagree"

    def _unset(self, bit: int, block: bytes) -> None:
        if rest := self.where[block] & ~bit:
            self.where[block] = rest
        else:
            del self.where[block]
