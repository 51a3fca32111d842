"""match_chain(): how much of a prompt each group holds, found by looking up blocks of the prompt's chain. Pure.

Each group has a slot, and a set of groups is an int bitmask with a bit for each slot. To look up a block among 10^7
takes 0.5 us, because no cache of the processor holds the table. So most blocks are not looked up. Between two of its
gaps (see BlockLocations) a group holds the first blocks or none, and bisection finds the last block that it holds.
Nothing loops over groups.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coatcheck.router.routing.split_table import SplitTable

FloatArray: TypeAlias = NDArray[np.float64]
# Pairs (end, set of groups): the set of the blocks from the end of the pair before up to `end`.
_Runs: TypeAlias = list[tuple[int, int]]

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
    device_gaps: SplitTable,
    gaps: SplitTable,
) -> PrefixMatches:
    """The match of each group in `alive`; slots of no group match nothing. `on_device`, `on_host`: the set of groups
    that hold each block there. `expected`: see ExpectedBlocks.match. `device_gaps`, `gaps`: see BlockLocations.gaps."""
    slots = alive.bit_length()

    def in_any_tier(depth: int) -> int:
        block = chain[depth]
        return (on_device.get(block) | on_host.get(block)) & alive

    def held_or_expected(depth: int) -> int:
        return in_any_tier(depth) | _set_at(expected, depth) & alive

    def held_in_prefix(depth: int) -> int:
        return in_any_tier(depth) & _set_at(prefixes, depth)

    def on_device_in_prefix(depth: int) -> int:
        return on_device.get(chain[depth]) & _set_at(prefixes, depth)

    prefixes = _find_prefixes(chain, held_or_expected if expected else in_any_tier, gaps)
    matched = held = on_devices = _count_blocks(prefixes, slots)
    if prefixes and expected:
        held = on_devices = _count_blocks(_find_runs(held_in_prefix, _starts(chain, prefixes, gaps)), slots)
    if prefixes and len(on_host):
        on_devices = _count_blocks(_find_runs(on_device_in_prefix, _starts(chain, prefixes, device_gaps)), slots)
    return PrefixMatches(on_devices, held - on_devices, matched - held)


def _find_prefixes(chain: Sequence[bytes], holders: Callable[[int], int], gaps: SplitTable) -> _Runs:
    """The groups that hold or expect a block and all blocks before it, as long as there are any. `holders`: the groups
    that hold or expect the block at a depth."""
    prefixes = _intersect(_find_runs(holders, [0, len(chain)]))
    # Right for groups without gaps. The others hold no more than this.
    starts = _starts(chain, prefixes, gaps)
    if len(starts) <= 2:
        return prefixes
    return _intersect(_find_runs(lambda depth: holders(depth) & _set_at(prefixes, depth), starts))


def _starts(chain: Sequence[bytes], prefixes: _Runs, gaps: SplitTable) -> list[int]:
    """0, the depths after gaps of groups that have these prefixes, and the end of the longest prefix. In a prefix, a
    group that holds a block between one of these depths and the next has held all blocks since the first of the two."""
    length = prefixes[-1][0] if prefixes else 0
    blocks = chain[:length]
    if gaps.isdisjoint(blocks):
        return [0, length]
    after_gaps = (
        depth
        for depth, block in enumerate(blocks[:-1], start=1)
        if (groups := gaps.get(block)) and groups & _set_at(prefixes, depth - 1)
    )
    return [0, *after_gaps, length]


def _find_runs(holders: Callable[[int], int], starts: Sequence[int]) -> _Runs:
    """The holders of each block before the last of `starts`. Between two of these depths a group that does not hold a
    block holds none after it. So if two blocks have equal sets, all blocks between them have the same set, and are not
    looked up."""
    runs: _Runs = []
    for start, end in pairwise(starts):
        if start == end:
            continue
        # Stretches to look at, the first one last: (depth, its set, depth, its set).
        stretches = [(start, holders(start), end, 0)]
        while stretches:
            first, before, last, after = stretches.pop()
            if before == after:
                continue
            if last - first == 1:
                runs.append((last, before))
                continue
            middle = (first + last) // 2
            between = holders(middle)
            stretches += (middle, between, last, after), (first, before, middle, between)
        if not runs or runs[-1][0] < end:
            runs.append((end, 0))
    return runs


def _intersect(runs: _Runs) -> _Runs:
    """The runs, each with the groups that are in all runs before too, as long as there are any."""
    kept: _Runs = []
    groups = runs[0][1] if runs else 0
    for end, held in runs:
        groups &= held
        if not groups:
            break
        kept.append((end, groups))
    return kept


def _set_at(runs: Sequence[tuple[int, int]], depth: int) -> int:
    """The set of the block at `depth`; 0 after the last run."""
    index = bisect_right(runs, depth, key=itemgetter(0))
    return runs[index][1] if index < len(runs) else 0


def _count_blocks(runs: _Runs, slots: int) -> FloatArray:
    """By slot, the number of blocks in the runs of a group."""
    counts, start = _BlockCounts(), 0
    for end, groups in runs:
        counts.count_for(groups, start)
        start = end
    return counts.to_array(start, slots)


class _BlockCounts:
    """A number of blocks for each group, counted along a chain.

    The numbers are stored by binary digit: `_digits[k]` is the set of groups whose number has digit k. To add to the
    numbers of a whole set of groups takes a few operations per digit.
    """

    __slots__ = ("_digits", "_groups", "_since")

    def __init__(self) -> None:
        self._groups = self._since = 0
        self._digits: list[int] = []

    def count_for(self, groups: int, depth: int) -> None:
        """From the block at `depth` on, each block counts for `groups`."""
        if groups == self._groups:
            return
        if self._groups:
            self._add(self._groups, depth - self._since)
        self._groups, self._since = groups, depth

    def to_array(self, depth: int, slots: int) -> FloatArray:
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
                carry, k = groups, lowest
                while carry:
                    if k >= len(digits):
                        digits += [0] * (k + 1 - len(digits))
                    digits[k], carry = digits[k] ^ carry, digits[k] & carry
                    k += 1
            number >>= 1
            lowest += 1
