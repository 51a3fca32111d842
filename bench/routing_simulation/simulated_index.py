"""The prefix index of simulated routers: which groups hold each block, and which are computing it.

KV events reach a router at once here, so one BlockHolders, kept by the groups themselves, stands for every router's
index of stored blocks. With events and a PrefixIndex for each router a run took twice as long, and gave the same
figures. For the 8 groups of a run these dictionaries are also faster than the product's index, which is made for a
thousand.

Each group has one bit; a set of groups is a bitmask.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, NamedTuple


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


class BlockHolders:
    """For device and host a mapping from block to the set of groups that hold it there."""

    def __init__(self) -> None:
        self.on_device: dict[bytes, int] = {}
        self.on_host: dict[bytes, int] = {}


class ExpectedHolders:
    """`groups[block]`: the set of groups to which one router has sent a prompt with that block that is not computed."""

    def __init__(self) -> None:
        self.groups: dict[bytes, int] = {}
        self._chains: dict[tuple[int, Hashable], Sequence[bytes]] = {}
        self._counts: dict[int, dict[bytes, int]] = {}  # group -> block -> number of these prompts that contain it

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._chains)

    def add(self, bit: int, key: Hashable, chain: Sequence[bytes]) -> None:
        """A prompt was sent to the group. `key` identifies it."""
        self._chains[bit, key] = chain
        counts, groups = self._counts.setdefault(bit, {}), self.groups
        for block in chain:
            if count := counts.get(block, 0):
                counts[block] = count + 1
            else:
                counts[block] = 1
                groups[block] = groups.get(block, 0) | bit

    def remove(self, bit: int, key: Hashable) -> None:
        """The prompt is computed."""
        counts = self._counts[bit]
        for block in self._chains.pop((bit, key)):
            if (count := counts[block]) > 1:
                counts[block] = count - 1
            else:
                del counts[block]
                remove_bit(self.groups, block, bit)


_NOTHING_EXPECTED: Mapping[bytes, int] = {}


def match_prefix(
    chain: Sequence[bytes], groups: int, holders: BlockHolders, expected: Mapping[bytes, int] = _NOTHING_EXPECTED
) -> dict[int, PrefixMatch]:
    """The match of each of `groups` with the first block of `chain`, by the group's bit."""
    on_device, on_host = holders.on_device, holders.on_host
    lengths: dict[int, int] = {}
    host_only: dict[int, int] = {}
    expected_only: dict[int, int] = {}
    alive = groups
    for depth, block in enumerate(chain):
        if not (missing := alive & ~on_device.get(block, 0)):
            continue
        ended = missing  # groups whose match ends before this block
        if on_host and (there := missing & on_host.get(block, 0)):
            _count(host_only, there)
            ended ^= there
        if expected and (there := ended & expected.get(block, 0)):
            _count(expected_only, there)
            ended ^= there
        if ended:
            alive ^= ended
            if depth:
                _set(lengths, ended, depth)
            if not alive:
                break
    if chain:
        _set(lengths, alive, len(chain))
    matches = {}
    for bit, blocks in lengths.items():
        host, coming = host_only.get(bit, 0), expected_only.get(bit, 0)
        matches[bit] = PrefixMatch(blocks - host - coming, host, coming)
    return matches


def remove_bit(sets: dict[bytes, int], block: bytes, bit: int) -> None:
    """Remove a group from the block's set. An empty set is dropped."""
    if rest := sets[block] ^ bit:
        sets[block] = rest
    else:
        del sets[block]


def _count(counts: dict[int, int], groups: int) -> None:
    while groups:
        bit = groups & -groups
        counts[bit] = counts.get(bit, 0) + 1
        groups ^= bit


def _set(values: dict[int, int], groups: int, value: int) -> None:
    while groups:
        bit = groups & -groups
        values[bit] = value
        groups ^= bit
