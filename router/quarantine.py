"""Quarantine: where requests that may end groups may run, and which of them is next.

How suspect each is says Suspicion. Those that are a little suspect may share a group; one that is more so has no other
suspect beside it, so that what becomes of the group is evidence. Of those that wait, the one of whose answer most is
delivered goes first: an innocent stream stands still for less long, and one that fails in its prompt comes last. Each
kind of group has turns of its own: who waits for one that is not there holds nobody else up. It does not know what a
request asks for, nor who else runs.
"""

from bisect import insort
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple, TypeVar

_TOGETHER: Final = 2  # each two of level 1, or one of level 2

_T = TypeVar("_T")


class Turn(NamedTuple):
    """A place among those that wait for groups of one kind; the least is next."""

    kind: Hashable
    place: tuple[int, int]


class Quarantine:
    """`waiting` while some could run now or later, but for other suspects."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, list[tuple[int, int]]] = {}  # by kind, in order
        self._numbers = count()

    @property
    def waiting(self) -> bool:
        """Whether somebody waits."""
        return bool(self._turns)

    @contextmanager
    def turn(self, level: int, tokens: int, kind: Hashable = None) -> Iterator[Turn | None]:
        """A place among those that wait for groups of this kind, for one that has so many tokens of its answer."""
        if level < _TOGETHER:
            yield None
            return
        turn = Turn(kind, (-tokens, next(self._numbers)))
        turns = self._turns.setdefault(kind, [])
        insort(turns, turn.place)
        try:
            yield turn
        finally:
            turns.remove(turn.place)
            if not turns:
                del self._turns[kind]

    def places(self, level: int, turn: Turn | None, groups: Iterable[tuple[_T, int]]) -> list[_T]:
        """Of groups, each with the level of its most suspicious request, those where this one may run now. They are
        not looked at for one whose turn it is not: after a crash many wait, and all are woken by each that is placed.
        """
        if turn is not None and turn.place != self._turns[turn.kind][0]:
            return []
        groups = list(groups)
        free = [group for group, other in groups if not other]
        if level < _TOGETHER and not free:  # rather alone as well, so that few are on two lost groups together
            return [group for group, other in groups if level + other <= _TOGETHER]
        return free
