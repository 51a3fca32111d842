"""Poison requests: a request that crashes the groups it runs on is refused after two crashes.

The evidence is two groups in a row that crashed while they ran the request; the second had sent no output for it and
ran no other suspect. A suspect is a request that has lost a group and is not cleared by output of the next one (see
PoisonSuspicion.level). Suspects are kept apart as far as that costs little:

- A request that had no output yet when its group crashed shares a group with no other suspect. Most poison requests
  crash a group during prefill.
- Requests that had already streamed output when their group crashed may share a group: they are many, and isolating
  each would make them wait for one another. If one of them crashes the next group too, the suspect is the request
  that streamed nothing there.

Whether a group crashed by itself is not always known: it may hang, or may have been killed, for example by the kernel's
OOM killer. After a loss of unknown cause a request is a suspect, but it is refused only if the loss is the third in a
row. Some causes become known later, from the group's supervisor, so they are read again for each decision. No request
is refused for a loss that it shared with another suspect.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from coatcheck.router.groups.group_failures import FailureCause, GroupFailure, GroupLost

_MAY_SHARE, _ALONE = 1, 2  # see PoisonSuspicion.level; 0 is no suspect
_CLEARING_TOKENS: Final = 64  # tokens from the next group after which earlier losses no longer count
_MAX_LOSSES: Final = 3

_T = TypeVar("_T")


class _Loss(NamedTuple):
    failure: GroupFailure
    was_only_suspect: bool  # no other suspect ran on the group
    answered: bool  # the group had sent some of the answer


class PoisonSuspicion:
    """The losses of one request, and what follows from them."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._losses_in_a_row: list[_Loss] = []  # losses since the last answer
        self._tokens = 0  # answered since the last loss

    def __bool__(self) -> bool:
        """Whether any loss counts against the request."""
        return bool(self._losses)

    def record_loss(self, lost: GroupLost, *, answered: bool = False) -> None:
        """Records that the request has lost its group. `answered`: the group had sent some of the answer."""
        if lost.failure.cause is not FailureCause.PLANNED:
            loss = _Loss(lost.failure, lost.was_only_suspect, answered)
            self._losses.append(loss)
            self._losses_in_a_row.append(loss)
            self._tokens = 0

    def record_answer(self, tokens: int) -> None:
        """Records an answer of the next group: `tokens` tokens, or (0) prompt log-probabilities that the client did not
        have."""
        self._losses_in_a_row.clear()
        self._tokens += tokens
        if self._tokens >= _CLEARING_TOKENS:
            self._losses.clear()

    @property
    def level(self) -> int:
        """0: the request is no suspect. 1: it may share a group with suspects of level 1. 2: it shares a group with no
        other suspect."""
        crashes_before = _count(self._losses, FailureCause.CRASH) - _count(self._losses_in_a_row, FailureCause.CRASH)
        if len(self._losses_in_a_row) > 1 or crashes_before > 1:
            return _ALONE
        if any(loss.failure.cause is FailureCause.CRASH and not loss.answered for loss in self._losses_in_a_row):
            return _ALONE
        return _MAY_SHARE if self._losses_in_a_row else 0

    @property
    def refusal(self) -> str:
        """Why the request is refused; "" if it is sent to another group."""
        losses = self._losses_in_a_row
        if self._is_guilty(FailureCause.CRASH):
            count, happened = _count(self._losses, FailureCause.CRASH), "crashed"
        elif len(losses) >= _MAX_LOSSES and losses[-1].was_only_suspect:
            count, happened = len(losses), "were lost"
        else:
            return ""
        return f"{count} groups in a row {happened} while they ran this request ({losses[-1].failure.reason})"

    @property
    def undecided(self) -> list[GroupFailure]:
        """The failures of unknown cause, if the request would be refused should all of them be crashes; else none."""
        if self._is_guilty(FailureCause.CRASH) or not self._is_guilty(FailureCause.CRASH, FailureCause.UNKNOWN):
            return []
        return [loss.failure for loss in self._losses if loss.failure.cause is FailureCause.UNKNOWN]

    async def wait_for_causes(self, seconds: float) -> None:
        """Waits at most `seconds` until no failure is undecided."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while undecided := self.undecided:
                    await undecided[0].wait_for_cause()

    def _is_guilty(self, *causes: FailureCause) -> bool:
        """Whether the request is refused if exactly the losses with these causes count as crashes."""
        losses = self._losses_in_a_row
        if not losses or not losses[-1].was_only_suspect or losses[-1].failure.cause not in causes:
            return False
        return _count(losses, *causes) > 1 or _count(self._losses, *causes) >= _MAX_LOSSES


def _count(losses: Sequence[_Loss], *causes: FailureCause) -> int:
    return sum(loss.failure.cause in causes for loss in losses)


def groups_for_suspect(level: int, groups: Iterable[tuple[_T, int]]) -> list[_T]:
    """The groups where a suspect of this level may run now. `groups`: each group with the level of the most suspect
    request that runs there."""
    groups = list(groups)
    free = [group for group, other_level in groups if not other_level]
    if level == _MAY_SHARE and not free:  # alone if possible, so that few suspects lose a second group together
        return [group for group, other_level in groups if other_level == _MAY_SHARE]
    return free
