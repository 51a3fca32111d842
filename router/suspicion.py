"""Suspicion: what the groups that a request has lost say of it: nothing, that it runs apart, or that it is refused.

Two groups that ended by themselves, one after the other, while they ran a request and before the second had answered
any of it, are the evidence: it is refused, and no third one sees it. So that the second tells on whom it is evidence,
what the first had not answered yet runs where no other suspect does: a request that ends groups mostly does so in its
prompt. Streams that it had begun to answer are many, and would wait for each other: they may share a group, and one of
them that ends it too, which is rarer, is told from the others by having got nothing there. Whether a group was ended by
what ran on it cannot always be known (one that hangs, one that was killed, perhaps by the kernel for its memory): such
a loss leaves what ran there under suspicion, but it takes three in a row, the last one apart, to refuse it. Nobody is
refused for a loss that it shared with another suspect. Pure; it does not know groups.
"""

from typing import Final

from .losses import Cause, Loss

# A request that came so far on the next group had no part in the end of the one before.
_CLEARING_TOKENS: Final = 64
_APART: Final = 2
_MOST_IN_A_ROW: Final = 3


class Suspicion:
    """One request's."""

    def __init__(self) -> None:
        # Nothing was answered in between; whether it ran apart; and whether that group had answered any of it.
        self._row: list[tuple[Loss, bool, bool]] = []
        self._crashes = 0  # before that, each with a little answered in between
        self._tokens = 0  # answered since

    @property
    def losses(self) -> list[Loss]:
        """In a row."""
        return [loss for loss, _, _ in self._row]

    @property
    def is_any(self) -> bool:
        """Whether there is anything that an answer would clear it of."""
        return bool(self._row or self._crashes)

    @property
    def level(self) -> int:
        """How many other suspects the request must have beside it at most: 0: it is none; 1: one that is as little
        suspect; 2: it runs apart from all."""
        in_prompt = any(loss.cause is Cause.CRASH and not answered for loss, _, answered in self._row)
        if in_prompt or len(self._row) > 1 or self._crashes > 1:
            return _APART
        return len(self._row)

    @property
    def refusal(self) -> str:
        """Why it is not sent to another group; "" while it is."""
        if not self._row or not self._row[-1][1]:
            return ""
        crashes, last = self._in_row(Cause.CRASH), self._row[-1][0]
        if last.cause is Cause.CRASH and (crashes > 1 or self._crashes + crashes >= _MOST_IN_A_ROW):
            count = self._crashes + crashes
            return f"{count} groups in a row ended by themselves while they ran this request ({last.reason})"
        if len(self._row) >= _MOST_IN_A_ROW:
            return f"{len(self._row)} groups in a row were lost while they ran this request ({last.reason})"
        return ""

    def lost(self, loss: Loss, *, apart: bool, answered: bool = False) -> None:
        """Its group is lost, on which it ran `apart` from other suspects, and which had `answered` some of it."""
        if loss.cause is not Cause.WANTED:
            self._row.append((loss, apart, answered))
            self._tokens = 0

    def answered(self, tokens: int) -> None:
        """The next group has brought so many tokens, or at least passed where the request's prompt had come to."""
        self._crashes += self._in_row(Cause.CRASH)
        self._row.clear()
        self._tokens += tokens
        if self._tokens >= _CLEARING_TOKENS:
            self._crashes = 0

    def _in_row(self, cause: Cause) -> int:
        return sum(loss.cause is cause for loss, _, _ in self._row)
