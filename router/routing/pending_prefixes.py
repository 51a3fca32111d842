"""PendingPrefixes: the blocks of prompts that this router has sent and that the group's events do not contain yet.

They will be cached by the time that a prompt sent now is computed, so a burst of one session goes to one group. A group
is a bit here, as in the prefix index, and bits are reused: after a group has left, its bit may belong to another group,
or to the same group after it attached again. Therefore an expectation ends only once, when it is settled or when its
group is forgotten; settling it after that changes nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class PendingPrefix:
    """The blocks of one prompt that was sent to one attachment of one group. Compared by identity."""

    bit: int
    chain: Sequence[bytes]


class PendingPrefixes:
    """`where[block]` are the groups, as bits, to which a prompt with that block is on its way."""

    def __init__(self) -> None:
        self.where: dict[bytes, int] = {}
        self._counts: dict[int, dict[bytes, int]] = {}  # group -> block -> open expectations that have it
        self._open: dict[int, set[PendingPrefix]] = {}  # group -> expectations neither settled nor forgotten

    def __len__(self) -> int:
        """Blocks by group."""
        return sum(map(len, self._counts.values()))

    def add(self, bit: int, chain: Sequence[bytes]) -> PendingPrefix:
        """Records that a prompt was sent to the group: its blocks are expected there until `settle` or `forget`."""
        expectation = PendingPrefix(bit, chain)
        self._open.setdefault(bit, set()).add(expectation)
        counts, where = self._counts.setdefault(bit, {}), self.where
        for block in chain:
            if count := counts.get(block, 0):
                counts[block] = count + 1
            else:
                counts[block] = 1
                where[block] = where.get(block, 0) | bit
        return expectation

    def settle(self, expectation: PendingPrefix) -> None:
        """Ends an expectation whose prompt is computed or never will be. Changes nothing if it has ended before."""
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
        assert self._open.keys() == self._counts.keys(), (
            "groups with open expectations and groups with counts are the same"
        )
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
