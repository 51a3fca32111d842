"""Poison requests: a request that crashes the groups it runs on is refused after it has cost two of them.

Evidence is two groups in a row that crashed while they ran the request, the second before it had answered anything and
while no other suspect ran there. So suspects are kept apart, as far as that costs little:

- A request that had got nothing of its answer when its group crashed runs beside no other suspect. Most poison requests
  crash a group in their prompt.
- Streams that were being answered are many and would wait long for each other, so they may share a group. One that
  crashes it has got nothing there, unlike the others.

Whether a group crashed by itself is not always known: it may hang, or may have been killed, perhaps by the kernel for
its memory. A loss of unknown cause leaves its requests suspects, but refuses a request only if it is the third in a
row. Some causes become known later, from the group's supervisor, so they are read again for each decision. No request
is refused for a loss that it shared with another suspect.
"""

import asyncio
from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final, NamedTuple, TypeVar

from coatcheck.router.groups.group_failures import FailureCause, GroupFailure

# Levels of suspicion: none; may share a group with others of this level; shares a group with no suspect.
_MAY_SHARE, _ALONE = 1, 2
_CLEARING_TOKENS: Final = 64  # a request that was answered so far by the next group had no part in the loss before
_MOST_LOSSES: Final = 3

_T = TypeVar("_T")


class _Loss(NamedTuple):
    failure: GroupFailure
    apart: bool  # no other suspect ran on the group
    answered: bool  # the group had answered some of the request


class PoisonSuspicion:
    """What the groups that one request has lost say about it."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._row_start = 0  # nothing was answered since the loss with this index
        self._tokens = 0  # answered since the last loss

    def __bool__(self) -> bool:
        """Whether there are losses of which an answer would clear the request."""
        return bool(self._losses)

    def record_loss(self, failure: GroupFailure, *, apart: bool, answered: bool = False) -> None:
        """The request has lost its group. `apart`: no other suspect ran there. `answered`: the group had answered some
        of it."""
        if failure.cause is not FailureCause.WANTED:
            self._losses.append(_Loss(failure, apart, answered))
            self._tokens = 0

    def record_answer(self, tokens: int) -> None:
        """The next group has answered `tokens` tokens, or prompt log-probabilities that no group had reached before."""
        self._row_start = len(self._losses)
        self._tokens += tokens
        if self._tokens >= _CLEARING_TOKENS:
            self._losses.clear()
            self._row_start = 0

    @property
    def level(self) -> int:
        """0: the request is no suspect. 1: it may share a group with others of level 1. 2: it shares a group with no
        suspect."""
        row, before = self._losses[self._row_start :], self._losses[: self._row_start]
        if len(row) > 1 or _count(before, FailureCause.CRASH) > 1:
            return _ALONE
        if any(loss.failure.cause is FailureCause.CRASH and not loss.answered for loss in row):
            return _ALONE
        return _MAY_SHARE if row else 0

    @property
    def refusal(self) -> str:
        """Why the request is not sent to another group; "" if it is."""
        row = self._losses[self._row_start :]
        if not row or not row[-1].apart:
            return ""
        reason = row[-1].failure.reason
        if self._is_guilty(FailureCause.CRASH):
            crashes = _count(self._losses, FailureCause.CRASH)
            return f"{crashes} groups in a row ended by themselves while they ran this request ({reason})"
        if len(row) >= _MOST_LOSSES:
            return f"{len(row)} groups in a row were lost while they ran this request ({reason})"
        return ""

    @property
    def undecided(self) -> list[GroupFailure]:
        """The failures of unknown cause for which the request would be refused if all of them were crashes."""
        row = self._losses[self._row_start :]
        if not row or not row[-1].apart or self._is_guilty(FailureCause.CRASH):
            return []
        if not self._is_guilty(FailureCause.CRASH, FailureCause.UNKNOWN):
            return []
        return [loss.failure for loss in self._losses if loss.failure.cause is FailureCause.UNKNOWN]

    async def wait_for_causes(self, seconds: float) -> None:
        """Waits at most `seconds` until no failure is undecided."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while undecided := self.undecided:
                    await undecided[0].wait_for_cause()

    def _is_guilty(self, *causes: FailureCause) -> bool:
        """Whether the losses are evidence enough if exactly those with these causes were crashes."""
        row = self._losses[self._row_start :]
        if row[-1].failure.cause not in causes:
            return False
        return _count(row, *causes) > 1 or _count(self._losses, *causes) >= _MOST_LOSSES


def _count(losses: Sequence[_Loss], *causes: FailureCause) -> int:
    return sum(loss.failure.cause in causes for loss in losses)


class _Turn(NamedTuple):
    order: int  # the least is next
    number: int
    is_next: asyncio.Event


class PoisonQuarantine:
    """The order in which waiting suspects get a place: first the one with most of its answer delivered.

    So an innocent stream stands still for less long, and a request that crashes groups in its prompt comes last. Each
    kind of group and each level has an order of its own. Only the suspect that is next looks for a place, because after
    a crash many wait.
    """

    def __init__(self) -> None:
        self._turns: dict[Hashable, list[_Turn]] = {}  # by level and kind of group, in order
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    @contextmanager
    def take_turn(self, level: int, delivered_tokens: int, kind: Hashable = None) -> Iterator[asyncio.Event]:
        """Queues a suspect until the block is left. The event is set while the suspect is next."""
        turns = self._turns.setdefault((level, kind), [])
        own = _Turn(-delivered_tokens, next(self._numbers), asyncio.Event())
        insort(turns, own)
        if turns[0] is own:
            own.is_next.set()
            if len(turns) > 1:
                turns[1].is_next.clear()
        try:
            yield own.is_next
        finally:
            turns.remove(own)
            if turns:
                turns[0].is_next.set()
            else:
                del self._turns[level, kind]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        for turns in self._turns.values():
            assert turns == sorted(turns), "suspects are in order"
            assert [turn.is_next.is_set() for turn in turns] == [True, *[False] * (len(turns) - 1)], "one is next"


def places_for_suspect(level: int, groups: Iterable[tuple[_T, int]]) -> list[_T]:
    """The groups where a suspect of this level may run now. `groups`: each group with the level of the most suspect
    request that runs there."""
    groups = list(groups)
    free = [group for group, other_level in groups if not other_level]
    if level == _MAY_SHARE and not free:  # alone if possible, so that few suspects lose a second group together
        return [group for group, other_level in groups if other_level == _MAY_SHARE]
    return free
