"""PoisonSuspicion: decides from the groups that a request has lost whether it runs alone, or is refused.

Two groups that ended by themselves, one after the other, while they ran a request and before the second had answered
any of it, are the evidence: it is refused, and no third one sees it. So that the second tells on whom it is evidence,
what the first had not answered yet runs where no other suspect does: a request that ends groups mostly does so in its
prompt. Streams that it had begun to answer are many, and would wait for each other: they may share a group, and one of
them that ends it too, which is rarer, is told from the others by having got nothing there. Whether a group was ended by
what ran on it cannot always be known (one that hangs, one that was killed, perhaps by the kernel for its memory): such
a loss leaves what ran there under suspicion, but it takes three in a row, the last one apart, to refuse it. Often it
becomes known while the request is being answered again; what was answered in between clears it of nothing that is not
known yet. Nobody is refused for a loss that it shared with another suspect. Pure; it does not know groups.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from coatcheck.router.groups.group_failures import FailureCause, GroupFailure

# A request that came so far on the next group had no part in the end of the one before.
_CLEARING_TOKENS: Final = 64
_APART: Final = 2
_MOST_IN_A_ROW: Final = 3


class _Lost(NamedTuple):
    loss: GroupFailure
    apart: bool  # the request ran apart from other suspects
    answered: bool  # that group had answered any of it


class PoisonSuspicion:
    """One request's. Causes are looked at anew each time, since they may have become known."""

    def __init__(self) -> None:
        self._row: list[_Lost] = []  # nothing was answered in between
        self._before: list[GroupFailure] = []  # ahead of those, with a little answered behind each row
        self._tokens = 0  # answered since the last one

    @property
    def is_any(self) -> bool:
        """Whether there is anything that an answer would clear it of."""
        return bool(self._row or self._before)

    @property
    def level(self) -> int:
        """How many other suspects the request must have beside it at most: 0: it is none; 1: one that is as little
        suspect; 2: it runs apart from all."""
        in_prompt = any(lost.loss.cause is FailureCause.CRASH and not lost.answered for lost in self._row)
        if in_prompt or len(self._row) > 1 or _count(self._before, FailureCause.CRASH) > 1:
            return _APART
        return len(self._row)

    @property
    def refusal(self) -> str:
        """Why it is not sent to another group; "" while it is."""
        if not self._row or not self._row[-1].apart:
            return ""
        last = self._row[-1].loss
        if self._has_ended(FailureCause.CRASH):
            count = _count(self._before, FailureCause.CRASH) + _count(self._in_row, FailureCause.CRASH)
            return f"{count} groups in a row ended by themselves while they ran this request ({last.reason})"
        if len(self._row) >= _MOST_IN_A_ROW:
            return f"{len(self._row)} groups in a row were lost while they ran this request ({last.reason})"
        return ""

    @property
    def undecided(self) -> list[GroupFailure]:
        """Of unknown cause, where the request would be refused if those groups had ended by themselves."""
        if not self._row or not self._row[-1].apart or self._has_ended(FailureCause.CRASH):
            return []
        unknown = [loss for loss in (*self._before, *self._in_row) if loss.cause is FailureCause.UNKNOWN]
        return unknown if self._has_ended(FailureCause.CRASH, FailureCause.UNKNOWN) else []

    def lost(self, loss: GroupFailure, *, apart: bool, answered: bool = False) -> None:
        """Its group is lost, on which it ran `apart` from other suspects, and which had `answered` some of it."""
        if loss.cause is not FailureCause.WANTED:
            self._row.append(_Lost(loss, apart, answered))
            self._tokens = 0

    def answered(self, tokens: int) -> None:
        """The next group has brought so many tokens, or at least passed where the request's prompt had come to."""
        self._before += self._in_row
        self._row.clear()
        self._tokens += tokens
        if self._tokens >= _CLEARING_TOKENS:
            self._before.clear()

    @property
    def _in_row(self) -> list[GroupFailure]:
        return [lost.loss for lost in self._row]

    def _has_ended(self, *causes: FailureCause) -> bool:
        """Whether it is too much if just what was lost for these causes counts as a crash."""
        last, in_row = self._row[-1].loss, _count(self._in_row, *causes)
        return last.cause in causes and (in_row > 1 or _count(self._before, *causes) + in_row >= _MOST_IN_A_ROW)


def _count(losses: Sequence[GroupFailure], *causes: FailureCause) -> int:
    return sum(loss.cause in causes for loss in losses)
