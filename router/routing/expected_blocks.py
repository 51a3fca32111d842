"""ExpectedBlocks: blocks of prompts that this router has sent, and that the groups' events do not contain yet.

A group will have cached these blocks by the time it computes a prompt that is sent now, so requests of one session that
arrive together go to one group. Each group has one bit; a set of groups is an int bitmask. A bit is reused after its
group has left.
"""

from collections import Counter
from collections.abc import Hashable, Sequence


class ExpectedBlocks:
    """`groups_by_block[block]`: the groups to which a prompt with that block was sent.

    A prompt is identified by `key`, which the caller never uses twice. So removing a prompt of a group that has left
    changes nothing, even if another group has the same bit now.
    """

    def __init__(self) -> None:
        self.groups_by_block: dict[bytes, int] = {}
        self._chains: dict[int, dict[Hashable, Sequence[bytes]]] = {}  # group -> key -> blocks of the prompt
        self._counts: dict[int, dict[bytes, int]] = {}  # group -> block -> number of these prompts that contain it

    def __len__(self) -> int:
        """Number of (group, block) pairs."""
        return sum(map(len, self._counts.values()))

    def add(self, bit: int, key: Hashable, chain: Sequence[bytes]) -> None:
        """Records that a prompt with the blocks `chain` was sent to the group."""
        self._chains.setdefault(bit, {})[key] = chain
        counts, groups_by_block = self._counts.setdefault(bit, {}), self.groups_by_block
        for block in chain:
            if count := counts.get(block, 0):
                counts[block] = count + 1
            else:
                counts[block] = 1
                groups_by_block[block] = groups_by_block.get(block, 0) | bit

    def remove(self, bit: int, key: Hashable) -> None:
        """Removes a prompt that is computed or never will be; changes nothing if the group has no such prompt."""
        chain = self._chains.get(bit, {}).pop(key, ())
        counts = self._counts.get(bit, {})
        for block in chain:
            if (count := counts[block]) > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                self._clear_bit(bit, block)

    def remove_group(self, bit: int) -> None:
        """Removes all prompts of a group."""
        self._chains.pop(bit, None)
        for block in self._counts.pop(bit, ()):
            self._clear_bit(bit, block)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        expected: dict[bytes, int] = {}
        assert self._chains.keys() == self._counts.keys(), "groups with prompts and groups with counts differ"
        for bit, counts in self._counts.items():
            blocks = Counter(block for chain in self._chains[bit].values() for block in chain)
            assert counts == blocks, "a block's count differs from the number of prompts that contain it"
            for block in counts:
                expected[block] = expected.get(block, 0) | bit
        assert expected == self.groups_by_block, "the shared index and the groups' counts disagree"

    def _clear_bit(self, bit: int, block: bytes) -> None:
        if rest := self.groups_by_block[block] & ~bit:
            self.groups_by_block[block] = rest
        else:
            del self.groups_by_block[block]
