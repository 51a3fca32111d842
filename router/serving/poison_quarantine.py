"""PoisonQuarantine: where requests that may end groups may run, and which of them is next.

How suspect each is says Suspicion. Those that are a little suspect may share a group; one that is more so has no other
suspect beside it, so that what becomes of the group is evidence. Of those that wait, the one of whose answer most is
delivered goes first: an innocent stream stands still for less long, and one that fails in its prompt comes last. Each
kind of group has turns of its own: who waits for one that is not there holds nobody else up. It does not know what a
request asks for, nor who else runs.
"""

import asyncio
from bisect import insort
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple, TypeVar

_TOGETHER: Final = 2  # each two of level 1, or one of level 2

_T = TypeVar("_T")


class _Turn(NamedTuple):
    tokens: int  # below 0: the least is next
    number: int
    is_next: asyncio.Event


class PoisonQuarantine:
    """After a crash many wait: only who is next looks whether there is a place, and wakes the one behind it."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, list[_Turn]] = {}  # by level and kind, in order
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    @contextmanager
    def turn(self, level: int, tokens: int, kind: Hashable = None) -> Iterator[asyncio.Event]:
        """A place among those as suspect that wait for groups of this kind, for one that has so many tokens of its
        answer. The event is set while it is next."""
        turns = self._turns.setdefault((level, kind), [])
        mine = _Turn(-tokens, next(self._numbers), asyncio.Event())
        insort(turns, mine)
        if turns[0] is mine:
            mine.is_next.set()
            if len(turns) > 1:
                turns[1].is_next.clear()
        try:
            yield mine.is_next
        finally:
            turns.remove(mine)
            if turns:
                turns[0].is_next.set()
            else:
                del self._turns[level, kind]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        for turns in self._turns.values():
            assert turns == sorted(turns), "they are in order"
            assert [turn.is_next.is_set() for turn in turns] == [True, *[False] * (len(turns) - 1)], "one is next"


def places(level: int, groups: Iterable[tuple[_T, int]]) -> list[_T]:
    """Of groups, each with the level of its most suspicious request, those where one so suspect may run now."""
    groups = list(groups)
    free = [group for group, other in groups if not other]
    if level < _TOGETHER and not free:  # rather alone as well, so that few are on two lost groups together
        return [group for group, other in groups if level + other <= _TOGETHER]
    return free
