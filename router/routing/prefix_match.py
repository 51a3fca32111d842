"""PrefixMatch: one walk along a prompt's chain of blocks, which matches every group at once. Pure.

A group is a bit; where a block lies is the set of groups that hold it. It does not know how that is found out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

# Block hash -> groups.
Where = Mapping[bytes, int]


class PrefixMatch(NamedTuple):
    """Blocks of a chain that one group holds from its start without a break, by where they are."""

    device: int
    host: int  # there alone
    expected: int  # nowhere yet, but to be computed there before anything that is sent now

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.device + self.host + self.expected


NOTHING: Final = PrefixMatch(0, 0, 0)


def walk(
    chain: Sequence[bytes], alive: int, on_device: Where, on_host: Where, expected: Where
) -> Iterator[tuple[int, PrefixMatch]]:
    """For each of the groups `alive` its match, where that is not empty."""
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
    """Each set bit by itself."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
