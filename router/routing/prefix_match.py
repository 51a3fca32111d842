"""PrefixMatch: how much of a prompt each group holds, found by one walk along the prompt's chain of blocks. Pure.

A group is a bit, and the groups that hold a block are a set of bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

# Block hash -> groups.
Where = Mapping[bytes, int]


class PrefixMatch(NamedTuple):
    """Number of blocks that one group holds from the start of a chain without a gap, by where they are."""

    device: int
    host: int  # not on the device
    expected: int  # in no tier, but computed before a request that is sent now

    @property
    def blocks(self) -> int:
        """Length of the matched prefix."""
        return self.device + self.host + self.expected


NOTHING: Final = PrefixMatch(0, 0, 0)


def match_chain(
    chain: Sequence[bytes], alive: int, on_device: Where, on_host: Where, expected: Where
) -> Iterator[tuple[int, PrefixMatch]]:
    """Pairs of a group of `alive` and its match; groups that do not hold the first block are left out."""
    length: dict[int, int] = {}
    host_only: dict[int, int] = {}
    coming: dict[int, int] = {}
    for depth, block in enumerate(chain):
        if not (missing := alive & ~on_device.get(block, 0)):
            continue
        lost = missing
        if on_host and (there := missing & on_host.get(block, 0)):
            for bit in _bits(there):
                host_only[bit] = host_only.get(bit, 0) + 1
            lost ^= there
        if expected and (there := lost & expected.get(block, 0)):
            for bit in _bits(there):
                coming[bit] = coming.get(bit, 0) + 1
            lost ^= there
        if lost:
            for bit in _bits(lost):
                length[bit] = depth
            alive ^= lost
            if not alive:
                break
    for bit in _bits(alive):
        length[bit] = len(chain)
    for bit, blocks in length.items():
        if blocks:
            host, soon = host_only.get(bit, 0), coming.get(bit, 0)
            yield bit, PrefixMatch(blocks - host - soon, host, soon)


def _bits(mask: int) -> Iterable[int]:
    """Each set bit of `mask` as a number."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
