"""Expectations: the blocks of prompts that this router has sent and whose group has not told of them yet.

By the time that a prompt sent now is computed they will be there, so a burst of one session goes to one group. Groups
are bits here, as in the prefix index. It does not know events, nor when an expectation ends: whoever sent the prompt
settles it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expectation:
    """One prompt on its way to one incarnation of a group."""

    group: str
    epoch: str
    chain: Sequence[bytes]


class Expectations:
    """`where[block]` are the groups, as bits, to which a prompt with that block is on its way."""

    def __init__(self) -> None:
        self.where: dict[bytes, int] = {}
        self._counts: dict[int, dict[bytes, int]] = {}  # group -> block -> prompts that have it

    def __len__(self) -> int:
        """Blocks by group."""
        return sum(map(len, self._counts.values()))

    def add(self, bit: int, chain: Sequence[bytes]) -> None:
        """A prompt goes there."""
        counts, where = self._counts.setdefault(bit, {}), self.where
        for block in chain:
            if count := counts.get(block, 0):
                counts[block] = count + 1
            else:
                counts[block] = 1
                where[block] = where.get(block, 0) | bit

    def remove(self, bit: int, chain: Sequence[bytes]) -> None:
        """One that went there is computed, or never will be."""
        counts = self._counts[bit]
        for block in chain:
            if (count := counts[block]) > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                self._unset(bit, block)

    def forget(self, bit: int) -> None:
        """The group is gone, and all that went there."""
        for block in self._counts.pop(bit, ()):
            self._unset(bit, block)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        expected: dict[bytes, int] = {}
        for bit, counts in self._counts.items():
            assert all(count > 0 for count in counts.values()), "an expectation of nobody"
            for block in counts:
                expected[block] = expected.get(block, 0) | bit
        assert expected == self.where, "the shared expectations and the groups' own disagree"

    def _unset(self, bit: int, block: bytes) -> None:
        if rest := self.where[block] & ~bit:
            self.where[block] = rest
        else:
            del self.where[block]
