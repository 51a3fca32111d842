"""PrefixMatch: how much of a prompt each group holds, found by one walk along the prompt's chain of blocks. Pure.

Each group has one bit; a set of groups is an int bitmask.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

# Block hash -> set of groups.
GroupsByBlock = Mapping[bytes, int]


class PrefixMatch(NamedTuple):
    """Number of blocks that one group holds from the start of a chain without a gap, by where they are."""

    device: int
    host: int  # not on the device
    expected: int  # in no tier yet, but part of a prompt that the group computes before a request that is sent now

    @property
    def blocks(self) -> int:
        """Length of the matched prefix."""
        return self.device + self.host + self.expected


NO_MATCH: Final = PrefixMatch(0, 0, 0)


def match_chain(
    chain: Sequence[bytes], alive: int, on_device: GroupsByBlock, on_host: GroupsByBlock, expected: GroupsByBlock
) -> Iterator[tuple[int, PrefixMatch]]:
    """Pairs (group, its match) for the groups in `alive`; groups without the first block are left out."""
    length: dict[int, int] = {}
    host_only: dict[int, int] = {}
    expected_only: dict[int, int] = {}
    for depth, block in enumerate(chain):
        if not (missing := alive & ~on_device.get(block, 0)):
            continue
        ended = missing  # groups whose match ends before this block
        if on_host and (there := missing & on_host.get(block, 0)):
            for bit in _bits(there):
                host_only[bit] = host_only.get(bit, 0) + 1
            ended ^= there
        if expected and (there := ended & expected.get(block, 0)):
            for bit in _bits(there):
                expected_only[bit] = expected_only.get(bit, 0) + 1
            ended ^= there
        if ended:
            for bit in _bits(ended):
                length[bit] = depth
            alive ^= ended
            if not alive:
                break
    for bit in _bits(alive):
        length[bit] = len(chain)
    for bit, blocks in length.items():
        if blocks:
            on_host_only, not_yet = host_only.get(bit, 0), expected_only.get(bit, 0)
            yield bit, PrefixMatch(blocks - on_host_only - not_yet, on_host_only, not_yet)


def _bits(mask: int) -> Iterable[int]:
    """The set bits of `mask`, each as a mask of its own."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
