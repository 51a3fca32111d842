"""StateLocations: the blocks at whose end groups have a snapshot of a model's states, and those that they will save.

A group whose model keeps states starts a prompt at such a block alone, however many blocks of KV it holds. So its match
is cut to the deepest block with a snapshot. Groups are named by slots of the PrefixIndex; a set of groups is a bitmask.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from coatcheck.proto.stubs.worker_pb2 import KvEvent
from coatcheck.router.routing.prefix_match import FloatArray, PrefixMatches


class StateLocations:
    """`groups`: the set of groups whose models keep states."""

    def __init__(self) -> None:
        self.groups = 0
        self._held: dict[bytes, int] = {}  # set of groups by block
        self._expected: dict[bytes, Counter[int]] = {}  # number of prompts of each slot, by block
        self._prompts: dict[int, dict[Hashable, bytes]] = {}  # slot -> prompt -> the block in `_expected`

    def add_group(self, slot: int) -> None:
        self.groups |= 1 << slot
        self._prompts[slot] = {}

    def remove_group(self, slot: int) -> None:
        """Forget a group. No effect on groups without states."""
        self.forget_held(slot)
        for prompt in list(self._prompts.get(slot, ())):
            self.remove_expected(slot, prompt)
        self._prompts.pop(slot, None)
        self.groups &= ~(1 << slot)

    def forget_held(self, slot: int) -> None:
        """Forget the snapshots that a group holds, until it reports them again."""
        if self.groups >> slot & 1:
            self._remove_held(slot, [block for block, groups in self._held.items() if groups >> slot & 1])

    def apply_events(self, slot: int, events: Iterable[KvEvent]) -> None:
        """Apply what a group has saved and dropped, in order. `events`: those with TIER_STATE."""
        for event in events:
            if event.stored:
                self._held[event.block_hash] = self._held.get(event.block_hash, 0) | 1 << slot
            else:
                self._remove_held(slot, [event.block_hash])

    def add_expected(self, slot: int, prompt: Hashable, block: bytes) -> None:
        """Record that the group will save the states at the end of `block`, until `remove_expected`."""
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
        """`matches` of `chain`. The match of a group with states ends at the deepest block where a prompt can start."""
        slots = [slot for slot in range(matches.device.size) if self.groups >> slot & 1]
        totals = matches.device + matches.host + matches.expected
        deepest = int(totals[slots].max()) if slots else 0
        held = [(depth, groups) for depth, block in enumerate(chain[:deepest], 1) if (groups := self._held.get(block))]
        expected = [
            (depth, sum(1 << slot for slot in counts))
            for depth, block in enumerate(chain[:deepest] if self._expected else (), 1)
            if (counts := self._expected.get(block))
        ]
        device, host, rest = (part.copy() for part in matches)
        for slot in slots:
            start = _deepest(held, slot, matches.device)
            soon = max(_deepest(held, slot, totals), _deepest(expected, slot, totals))
            device[slot], host[slot], rest[slot] = start, 0, soon - start
        return PrefixMatches(device, host, rest)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert all(self._held.values()) and not any(groups & ~self.groups for groups in self._held.values()), "held"
        assert sum(1 << slot for slot in self._prompts) == self.groups, "prompts of other groups"
        counts = Counter((slot, block) for slot, prompts in self._prompts.items() for block in prompts.values())
        listed = {(slot, block): count for block, slots in self._expected.items() for slot, count in slots.items()}
        assert counts == listed and all(self._expected.values()), "expected snapshots miscounted"

    def _remove_held(self, slot: int, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            if left := self._held.get(block, 0) & ~(1 << slot):
                self._held[block] = left
            else:
                self._held.pop(block, None)


def _deepest(places: Sequence[tuple[int, int]], slot: int, limits: FloatArray) -> int:
    """The deepest of `places`, (depth, set of groups) ascending, that the group in `slot` has, at most its limit."""
    limit = limits[slot]
    return next((depth for depth, groups in reversed(places) if groups >> slot & 1 and depth <= limit), 0)
