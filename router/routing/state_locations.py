"""StateLocations: after which blocks a prompt can start on groups whose models keep states (recurrent layers).

Such a group can start a prompt only after a block with a snapshot of the states, however many further blocks of KV it
holds. So its match is cut to the deepest block with a snapshot. A snapshot is *held* once the group's KV events report
it, and *expected* while a prompt that will save it is computed. A group is named by its slot in the PrefixIndex; a set
of groups is a bitmask.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coatcheck.proto.block_hash import HASH_BYTES
from coatcheck.proto.stubs.worker_pb2 import KvEvent
from coatcheck.router.routing.block_locations import EventProblem
from coatcheck.router.routing.prefix_match import FloatArray, PrefixMatches


class StateLocations:
    """`groups`: the set of groups whose models keep states."""

    def __init__(self, problems: Counter[EventProblem]) -> None:
        self.groups = 0
        self._problems = problems
        self._held: dict[bytes, int] = {}  # block -> set of groups
        self._held_by: dict[int, set[bytes]] = {}  # slot -> blocks
        self._expected: dict[bytes, Counter[int]] = {}  # block -> slot -> number of prompts
        self._prompts: dict[int, dict[Hashable, bytes]] = {}  # slot -> prompt -> the block in `_expected`

    def add_group(self, slot: int) -> None:
        """Add a group whose model keeps states."""
        self.groups |= 1 << slot
        self._held_by[slot] = set()
        self._prompts[slot] = {}

    def remove_group(self, slot: int) -> None:
        """Forget a group. No effect on groups without states."""
        self.forget_held(slot)
        for prompt in list(self._prompts.get(slot, ())):
            self.remove_expected(slot, prompt)
        self._held_by.pop(slot, None)
        self._prompts.pop(slot, None)
        self.groups &= ~(1 << slot)

    def count_held(self, slot: int) -> int:
        """The number of snapshots that a group holds; 0 without states."""
        return len(self._held_by.get(slot, ()))

    def forget_held(self, slot: int) -> None:
        """Forget the snapshots that a group holds, until it reports them again."""
        for block in list(self._held_by.get(slot, ())):
            self._remove_held(slot, block)

    def apply_events(self, slot: int, events: Iterable[KvEvent]) -> None:
        """Apply what a group has saved and dropped, in order. `events`: those with TIER_STATE."""
        for event in events:
            if len(event.block_hash) != HASH_BYTES:
                self._problems[EventProblem.MALFORMED] += 1
            elif event.stored:
                self._held[event.block_hash] = self._held.get(event.block_hash, 0) | 1 << slot
                self._held_by[slot].add(event.block_hash)
            else:
                self._remove_held(slot, event.block_hash)

    def add_expected(self, slot: int, prompt: Hashable, block: bytes) -> None:
        """Record that the group will save the states after `block`, until `remove_expected`. No effect on groups
        without states."""
        if slot in self._prompts:
            self._prompts[slot][prompt] = block
            self._expected.setdefault(block, Counter())[slot] += 1

    def remove_expected(self, slot: int, prompt: Hashable) -> None:
        """Remove a prompt that is computed or never will be. No effect if the group has no such prompt."""
        if (block := self._prompts.get(slot, {}).pop(prompt, None)) is None:
            return
        counts = self._expected[block]
        counts[slot] -= 1
        if not counts[slot]:
            del counts[slot]
        if not counts:
            del self._expected[block]

    def cut_matches(self, chain: Sequence[bytes], matches: PrefixMatches) -> PrefixMatches:
        """`matches` of `chain`. The match of a group with states ends after the deepest block where a prompt can start.

        A held snapshot counts as `device` if the KV up to there is on the device. It counts as `expected` if some of
        that KV is still to be computed, as an expected snapshot does.
        """
        keeps_states = _as_flags(self.groups, matches.device.size)
        on_device = matches.device * keeps_states
        totals = on_device + (matches.host + matches.expected) * keeps_states
        starts = _deepest_blocks(chain, on_device, self._holders)
        later_starts = starts
        if self._expected or not np.array_equal(totals, on_device):
            later_starts = _deepest_blocks(chain, totals, self._holders_or_expected)
        return PrefixMatches(
            np.where(keeps_states, starts, matches.device),
            np.where(keeps_states, 0, matches.host),
            np.where(keeps_states, later_starts - starts, matches.expected),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        sets = {block: sum(1 << slot for slot, held in self._held_by.items() if block in held) for block in self._held}
        assert self._held == sets, "the sets of groups and the groups' own blocks disagree"
        assert all(sets.values()) and sets.keys() == set().union(*self._held_by.values()), "blocks that no group holds"
        assert sum(1 << slot for slot in self._held_by) == self.groups, "snapshots of other groups"
        assert self._prompts.keys() == self._held_by.keys(), "prompts of other groups"
        counts = Counter((slot, block) for slot, prompts in self._prompts.items() for block in prompts.values())
        listed = {(slot, block): count for block, slots in self._expected.items() for slot, count in slots.items()}
        assert counts == listed and all(self._expected.values()), "expected snapshots miscounted"

    def _remove_held(self, slot: int, block: bytes) -> None:
        """No effect if the group does not hold the block's snapshot."""
        if block not in self._held_by[slot]:
            return
        self._held_by[slot].remove(block)
        if left := self._held[block] & ~(1 << slot):
            self._held[block] = left
        else:
            del self._held[block]

    def _holders(self, block: bytes) -> int:
        return self._held.get(block, 0)

    def _holders_or_expected(self, block: bytes) -> int:
        return self._held.get(block, 0) | sum(1 << slot for slot in self._expected.get(block, ()))


def _deepest_blocks(chain: Sequence[bytes], limits: FloatArray, holders: Callable[[bytes], int]) -> FloatArray:
    """By slot, the largest number of leading blocks of `chain`, at most the group's limit, after which the group is one
    of the `holders`; 0 if there is none.

    Every block from the longest limit down may be looked up, but a set of groups is handled at once.
    """
    deepest = np.zeros_like(limits)
    searching = _as_set(limits > 0)
    depth = int(limits.max(initial=0))
    while searching and depth:
        if groups := holders(chain[depth - 1]) & searching:
            found = _as_flags(groups, limits.size) & (limits >= depth)
            deepest[found] = depth
            searching ^= _as_set(found)
        depth -= 1
    return deepest


def _as_flags(groups: int, slots: int) -> NDArray[np.bool_]:
    """A set of groups as one flag for each slot."""
    packed = np.frombuffer(groups.to_bytes((max(slots, groups.bit_length()) + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=slots, bitorder="little").astype(np.bool_)


def _as_set(flags: NDArray[np.bool_]) -> int:
    """The inverse of `_as_flags`."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
