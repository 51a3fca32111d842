"""LoadTable: the loads of all groups as arrays, with one number per slot. A decision reads those of all groups at once.

A group's slot is its slot in the prefix index. Each GroupLoad writes its figures when they change.
"""

from typing import Final

import numpy as np

from coatcheck.router.routing.prefix_match import FloatArray
from coatcheck.router.routing.routing_cost import BoolArray, Candidate, Candidates, IndexArray, NameArray

_FIGURES: Final = slice(1, Candidate._fields.index("has_room"))  # the fields of a Candidate that are in `_figures`


class LoadTable:
    """One for a router. `has_room` and `is_full`: see GroupLoad; False in slots without a group.

    `gained_room`: since the flag was last cleared, a group without room has got room.
    """

    def __init__(self) -> None:
        self.gained_room = False
        self.has_room: BoolArray = np.zeros(0, bool)
        self.is_full: BoolArray = np.zeros(0, bool)
        self._figures: FloatArray = np.zeros((_FIGURES.stop - _FIGURES.start, 0))

    def write(self, slot: int, load: Candidate, *, is_full: bool) -> None:
        """Replaces the figures of a group."""
        if slot >= len(self.has_room):
            self._grow(slot)
        if load.has_room and not self.has_room[slot]:
            self.gained_room = True
        self._figures[:, slot] = load[_FIGURES]
        self.has_room[slot] = load.has_room
        self.is_full[slot] = is_full

    def clear(self, slot: int) -> None:
        """Forgets a group that has left."""
        self._figures[:, slot] = 0
        self.has_room[slot] = self.is_full[slot] = False

    def candidates(
        self, groups: NameArray, slots: IndexArray, device: FloatArray, host: FloatArray, expected: FloatArray
    ) -> Candidates:
        """The groups of these names and slots as candidates for a prompt. `device`, `host`, `expected`: for each group,
        the tokens of the prompt that it holds there, or is expected to hold."""
        figures = self._figures.take(slots, axis=1)
        return Candidates._make((groups, *figures, self.has_room[slots], device, host, expected))

    def _grow(self, slot: int) -> None:
        added = 2 * slot + 1 - len(self.has_room)
        self.has_room = np.append(self.has_room, np.zeros(added, bool))
        self.is_full = np.append(self.is_full, np.zeros(added, bool))
        self._figures = np.pad(self._figures, ((0, 0), (0, added)))
