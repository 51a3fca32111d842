"""GroupFailures: the groups that were lost, and the cause of each loss.

The cause may become known late or never. A group that crashes usually reports the error in a last message. If it
cannot, the supervisor learns the cause from the group's crash record when the next incarnation starts.
"""

import asyncio
from collections import Counter
from enum import Enum


class FailureCause(Enum):
    """Why a group was lost; the values are metric labels."""

    PLANNED = "planned"  # drained, or ejected because it is slow: no request is to blame
    CRASH = "crash"  # an error in a step, or a fault in one of the group's processes
    KILLED = "killed"  # ended from outside; the kernel's OOM killer may have done so because of a request's memory
    UNKNOWN = "unknown"  # the node is gone, the group hangs, or the cause is not known yet


class GroupFailure:
    """The loss of one incarnation of a group."""

    def __init__(self, reason: str, cause: FailureCause) -> None:
        self.reason = reason
        self.cause = cause
        self._is_known = asyncio.Event()
        if cause is not FailureCause.UNKNOWN:
            self._is_known.set()

    def set_cause(self, cause: FailureCause, reason: str) -> None:
        """Sets the cause that has become known. `reason`: text for users."""
        self.cause = cause
        self.reason = reason
        self._is_known.set()

    async def wait_for_cause(self) -> None:
        """Waits until the cause is known."""
        await self._is_known.wait()


class GroupLost(Exception):
    """The stream to a group has ended; another group can continue the request.

    `was_only_suspect`: no other suspect of a crash ran on the group.
    """

    def __init__(self, failure: GroupFailure, *, was_only_suspect: bool) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        self.was_only_suspect = was_only_suspect


class GroupEjected(Exception):
    """The stream to a group must end: the group is not the expected one, sends impossible messages, or is too slow.

    `pause`: least seconds until the next attempt to connect, for a group whose only fault is that it is slow; else 0.
    """

    def __init__(self, message: str, *, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class GroupFailures:
    """All losses of a router. `counts`: losses by the cause known at that time. `explained`: losses of unknown cause,
    by the cause that became known later."""

    def __init__(self) -> None:
        self.counts: Counter[FailureCause] = Counter()
        self.explained: Counter[FailureCause] = Counter()
        # group -> its last loss of unknown cause, with the incarnation that was lost
        self._unknown: dict[str, tuple[int, GroupFailure]] = {}

    def record_loss(self, group: str, incarnation: int, reason: str, cause: FailureCause) -> GroupFailure:
        """Records that the router has lost the stream to an incarnation of a group."""
        self.counts[cause] += 1
        failure = GroupFailure(reason, cause)
        # An incarnation that attached again after an earlier loss had not ended then. The way in which it ends explains
        # only the new loss.
        if group in self._unknown and self._unknown[group][0] == incarnation:
            del self._unknown[group]
        if cause is FailureCause.UNKNOWN:
            self._unknown[group] = (incarnation, failure)
        return failure

    def record_cause(self, group: str, incarnation: int, crash: str) -> None:
        """Records how an incarnation ended, as its supervisor reports. `crash`: its error if it crashed, "" if it was
        ended from outside."""
        lost_incarnation, failure = self._unknown.get(group, (None, None))
        if failure is None or lost_incarnation != incarnation:
            return
        del self._unknown[group]
        cause = FailureCause.CRASH if crash else FailureCause.KILLED
        self.explained[cause] += 1
        failure.set_cause(cause, crash or failure.reason)
