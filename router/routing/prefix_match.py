"""match_chain(): how much of a prompt each group holds, found by one walk along the prompt's chain of blocks. Pure.

Each group has a slot, and a set of groups is an int bitmask with a bit for each slot. The walk looks up each block once
or twice and compares sets; it never loops over groups. The sets of neighbouring blocks are mostly equal, and then often
the same object, which the walk skips over.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coatcheck.router.routing.split_table import SplitTable

FloatArray: TypeAlias = NDArray[np.float64]

_POWERS_OF_TWO: Final[FloatArray] = np.exp2(np.arange(63, dtype=np.float64))


class PrefixMatches(NamedTuple):
    """Number of blocks that each group holds from the start of a chain without a gap, by where they are. Arrays with
    one number per slot."""

    device: FloatArray
    host: FloatArray  # not on the device
    expected: FloatArray  # in no tier yet, but part of a prompt that the group computes before a request sent now


def match_chain(
    chain: Sequence[bytes],
    alive: int,
    on_device: SplitTable,
    on_host: SplitTable,
    expected: Sequence[tuple[int, int]],
) -> PrefixMatches:
    """The match of each group in `alive`; slots of no group match nothing. `on_device`, `on_host`: the set of groups
    that hold each block there. `expected`: see ExpectedBlocks.match."""
    slots = alive.bit_length()
    lengths, host_blocks, expected_blocks = _BlockCounts(alive), _BlockCounts(), _BlockCounts()
    runs = iter((*expected, (len(chain), 0)))
    run_end, expecting = next(runs)
    covered: object = _NO_SET  # the device holders of the last block, if they include all of `alive`
    seen: tuple[object, object, int] = _NONE_SEEN
    depth = 0
    for depth, device in enumerate(on_device.get_each(chain)):
        if device is covered:
            continue
        missing = alive if device is None else alive & ~device
        if not missing:
            covered, seen = device, _NONE_SEEN
            host_blocks.count_for(0, depth)
            expected_blocks.count_for(0, depth)
            continue
        covered = _NO_SET
        while depth >= run_end:
            run_end, expecting = next(runs)
        host = on_host.get(chain[depth])
        if device is seen[0] and host is seen[1] and expecting is seen[2]:
            continue
        seen = device, host, expecting
        host &= missing
        coming = (missing ^ host) & expecting
        host_blocks.count_for(host, depth)
        expected_blocks.count_for(coming, depth)
        alive ^= missing ^ host ^ coming
        lengths.count_for(alive, depth)
        if not alive:
            break
    else:
        depth = len(chain)
    matched_on_host, matched_expected = host_blocks.end(depth, slots), expected_blocks.end(depth, slots)
    device_blocks = lengths.end(depth, slots) - matched_on_host - matched_expected
    return PrefixMatches(device_blocks, matched_on_host, matched_expected)


_NO_SET: Final = object()
_NONE_SEEN: Final = (_NO_SET, _NO_SET, 0)


class _BlockCounts:
    """A number of blocks for each group, counted along a chain.

    The numbers are stored by binary digit: `_digits[k]` is the set of groups whose number has digit k. To add to the
    numbers of a whole set of groups takes a few operations per digit.
    """

    __slots__ = ("_digits", "_groups", "_since")

    def __init__(self, groups: int = 0) -> None:
        self._groups = groups
        self._since = 0
        self._digits: list[int] = []

    def count_for(self, groups: int, depth: int) -> None:
        """From the block at `depth` on, each block counts for `groups`."""
        if groups == self._groups:
            return
        if self._groups:
            self._add(self._groups, depth - self._since)
        self._groups, self._since = groups, depth

    def end(self, depth: int, slots: int) -> FloatArray:
        """The number of each slot, without blocks from `depth` on."""
        self.count_for(0, depth)
        if not self._digits:
            return np.zeros(slots)
        width = (slots + 7) // 8
        packed = np.frombuffer(b"".join([digit.to_bytes(width, "little") for digit in self._digits]), np.uint8)
        digits = np.unpackbits(packed.reshape(-1, width), axis=1, count=slots, bitorder="little")
        return _POWERS_OF_TWO[: len(digits)] @ digits.astype(np.float64)

    def _add(self, groups: int, number: int) -> None:
        digits = self._digits
        lowest = 0
        while number:
            if number & 1:
                carry, place = groups, lowest
                while carry:
                    if place >= len(digits):
                        digits += [0] * (place + 1 - len(digits))
                    digits[place], carry = digits[place] ^ carry, digits[place] & carry
                    place += 1
            number >>= 1
            lowest += 1
