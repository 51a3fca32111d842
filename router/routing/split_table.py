"""SplitTable: a mapping from block hash to int, in many small dicts.

A dict that has no place left copies all of its entries in one step. With 10^7 entries that takes 0.6 s, in which every
stream of the router waits. A SplitTable divides its entries by the first byte of the hash once there are
`_SPLIT_BLOCKS` of them, so that no dict holds more than one in 128, and none takes longer than a few milliseconds.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

_PARTS: Final = 128  # with fewer a part takes longer to grow, with more events are slower
_SPLIT_BLOCKS: Final = 1 << 15  # to divide these takes about as long as the growth of a part of 10^7 entries


class SplitTable:
    """`by_first_byte[block[0]]` is the dict that contains `block` if the table does. Call `split_if_large` after
    entries were added; it replaces the list."""

    __slots__ = ("by_first_byte",)

    def __init__(self) -> None:
        self.by_first_byte: list[dict[bytes, int]] = [{}] * 256

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            yield from part

    @property
    def parts(self) -> list[dict[bytes, int]]:
        """The dicts, each once."""
        return self.by_first_byte[:: 256 // _PARTS] if self._is_split else self.by_first_byte[:1]

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Pairs of block and value."""
        for part in self.parts:
            yield from part.items()

    def get(self, block: bytes, default: int = 0) -> int:
        """The value of a block, or `default`."""
        return self.by_first_byte[block[0]].get(block, default)

    def isdisjoint(self, blocks: Sequence[bytes]) -> bool:
        """Whether the table contains none of the blocks."""
        if not self._is_split:
            return not (whole := self.by_first_byte[0]) or whole.keys().isdisjoint(blocks)
        parts = map(self.by_first_byte.__getitem__, map(itemgetter(0), blocks))
        return not any(map(dict.__contains__, parts, blocks))

    def pop_each(self) -> Iterator[tuple[bytes, int]]:
        """Pairs of block and value, each removed from the table as it is returned."""
        for part in self.parts:
            while part:
                yield part.popitem()

    def split_if_large(self) -> None:
        """Divides a table of one dict that has become large."""
        whole = self.by_first_byte[0]
        if len(whole) <= _SPLIT_BLOCKS or self._is_split:
            return
        parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self.by_first_byte = [parts[first * _PARTS // 256] for first in range(256)]
        for block, value in whole.items():
            self.by_first_byte[block[0]][block] = value

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        if self._is_split:
            assert len({id(part) for part in self.by_first_byte}) == len(self.parts) == _PARTS, "a part too few"
            for part in self.parts:
                assert all(self.by_first_byte[block[0]] is part for block in part), "a block in another block's part"
        else:
            assert all(part is self.by_first_byte[0] for part in self.by_first_byte), "a table that is partly split"

    @property
    def _is_split(self) -> bool:
        return self.by_first_byte[0] is not self.by_first_byte[-1]
