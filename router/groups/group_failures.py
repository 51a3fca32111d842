"""GroupFailures: groups that were lost, and why, as far as it is known: at once, a moment later, or never.

A group that ends by itself mostly says so with its last breath; where it cannot, its supervisor learns it when the next
incarnation starts where the former has left its record. It does not know requests, nor what is concluded of them.
"""

import asyncio
from collections import Counter
from enum import Enum
from weakref import WeakValueDictionary


class FailureCause(Enum):
    """What ended a group, as it is counted."""

    WANTED = "wanted"  # it was drained, or is slow: no sign against anything that ran there
    CRASH = "crash"  # it ended by itself: an error in a step, or a fault in one of its processes
    KILLED = "killed"  # from outside, by whomever: the kernel too may do so, for memory that a request has taken
    UNKNOWN = "unknown"  # its node is gone, it hangs, or nothing has been learned yet


class GroupFailure:
    """One incarnation of a group is lost."""

    def __init__(self, group: str, reason: str, cause: FailureCause) -> None:
        self.group = group
        self.reason = reason
        self.cause = cause
        self._learned = asyncio.Event()
        if cause is not FailureCause.UNKNOWN:
            self._learned.set()

    def set_cause(self, cause: FailureCause, reason: str) -> None:
        """The cause has become known."""
        self.cause = cause
        self.reason = reason
        self._learned.set()

    async def wait_for_cause(self) -> None:
        """Waits until it is."""
        await self._learned.wait()


class GroupLost(Exception):
    """The stream to a group has ended; the request can continue on another. `apart`: no other suspect ran there."""

    def __init__(self, loss: GroupFailure, *, apart: bool) -> None:
        super().__init__(loss.reason)
        self.loss = loss
        self.apart = apart


class Ejected(Exception):
    """The stream to a group must end: the group is another one, sends what cannot be, or is too slow.

    `pause`: least seconds until the next attempt to connect, for a group whose only fault is that it is slow; else 0.
    """

    def __init__(self, message: str, *, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class GroupFailures:
    """Of one router. A loss is kept for as long as a request remembers it. `counts` has each once, by what was known
    when it was noticed; `learned` those that were unknown then, by what became known."""

    def __init__(self) -> None:
        self.counts: Counter[FailureCause] = Counter()
        self.explained: Counter[FailureCause] = Counter()
        self._unknown: set[tuple[str, int]] = set()  # of each group the last
        self._open: WeakValueDictionary[tuple[str, int], GroupFailure] = WeakValueDictionary()

    def record_loss(self, group: str, incarnation: int, reason: str, cause: FailureCause) -> GroupFailure:
        """That incarnation of a group is lost."""
        self.counts[cause] += 1
        loss = GroupFailure(group, reason, cause)
        # One that was lost from sight before, and attached again, has not ended then: how it ends now says nothing.
        self._unknown.discard((group, incarnation))
        self._open.pop((group, incarnation), None)
        if cause is FailureCause.UNKNOWN:
            self._open[group, incarnation] = loss
            self._unknown = {key for key in self._unknown if key[0] != group} | {(group, incarnation)}
        return loss

    def record_cause(self, group: str, incarnation: int, crash: str) -> None:
        """How it has ended: by itself, in words, or "", since it was ended from outside."""
        if (group, incarnation) not in self._unknown:
            return
        self._unknown.remove((group, incarnation))
        cause = FailureCause.CRASH if crash else FailureCause.KILLED
        self.explained[cause] += 1
        if (loss := self._open.pop((group, incarnation), None)) is not None:
            loss.set_cause(cause, crash or loss.reason)
