"""OpenSubmissions: the open submissions of one group, and when their readers are woken for new outputs.

A round begins when the readers of a step's outputs are woken. It ends when the last of them waits for outputs again; by
then the outputs are written to the clients. The next round begins after a pause as long as the round, but no step waits
longer than _LONGEST_WAIT_SECONDS. Steps that arrive before the next round are delivered together, as one delta for each
reader. So a router with time to spare passes tokens on at once, and a busy router spends less time on each token.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.groups.group_failures import FailureCause, GroupEjected, GroupFailure, GroupLost
from coatcheck.router.groups.submission import Submission

_LONGEST_WAIT_SECONDS: Final = 0.025
_MAX_WOKEN: Final = 256  # readers woken in one turn of the event loop; they take about 20 ms


class OpenSubmissions:
    """Create it inside an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._submissions: dict[int, Submission] = {}
        self._fresh: list[Submission] = []  # they have outputs, and their readers are woken next
        self._round = 0
        self._round_began = 0.0
        self._round_seconds = 0.0  # duration of the last complete round
        self._busy_readers = 0  # readers woken in this round that are still writing to their clients
        self._is_scheduled = False  # a call of _wake_readers is scheduled
        self._continues = False  # the scheduled call wakes more readers of the same round
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        """Number of open submissions."""
        return len(self._submissions)

    @property
    def suspicion(self) -> int:
        """The highest suspicion of an open submission."""
        return max((submission.suspicion for submission in self._submissions.values()), default=0)

    def add(self, submission: Submission) -> None:
        """Adds a submission, which gets the outputs with its id and attempt from now on."""
        submission.on_waiting_again = self._record_waiting_again
        self._submissions[submission.id] = submission
        self._is_idle.clear()

    def get(self, id: int) -> Submission | None:
        """The open submission with this id, if there is one."""
        return self._submissions.get(id)

    def remove(self, submission: Submission) -> None:
        """Drops further outputs of the submission; changes nothing if it was removed before."""
        if self._submissions.get(submission.id) is submission:
            del self._submissions[submission.id]
            self._record_waiting_again(submission.woken_in_round)
        if not self._submissions:
            self._is_idle.set()

    async def wait_until_idle(self) -> None:
        """Waits until no submission is open."""
        await self._is_idle.wait()

    def fail_all(self, loss: GroupFailure, unstarted: Iterable[int] = ()) -> None:
        """Fails every submission with GroupLost. `unstarted`: ids of the submissions that the group had not begun to
        compute, and that therefore cannot have caused the loss."""
        submissions, self._submissions = self._submissions, {}
        self._is_idle.set()
        unstarted = frozenset(unstarted)
        suspects = sum(submission.suspicion > 0 for submission in submissions.values())
        innocent = GroupFailure(loss.reason, FailureCause.PLANNED)
        for id, submission in submissions.items():
            was_only_suspect = suspects == (submission.suspicion > 0)
            submission.fail(GroupLost(innocent if id in unstarted else loss, was_only_suspect=was_only_suspect))

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Delivers one step's outputs; those of unknown submissions and of earlier attempts are dropped. Raises
        GroupEjected for a choice that the request does not have."""
        submissions, fresh = self._submissions, self._fresh
        for output in outputs:
            submission = submissions.get(output.id)
            if submission is not None and submission.attempt == output.attempt:
                if output.choice >= submission.choices:
                    raise GroupEjected(
                        f"the group sent output of choice {output.choice}; the request's n is {submission.choices}"
                    )
                submission.deliver(output)
                fresh.append(submission)
        if self._is_scheduled:
            return
        taken = self._loop.time() - self._round_began
        pause = 2 * max(self._round_seconds, taken if self._busy_readers else 0.0) - taken
        if pause > 0:
            self._is_scheduled = True
            self._loop.call_later(min(pause, _LONGEST_WAIT_SECONDS), self._wake_readers)
        else:
            self._wake_readers()

    def _wake_readers(self) -> None:
        if not self._continues:
            self._round += 1
            self._round_began = self._loop.time()
            self._busy_readers = 0
        fresh, self._fresh = self._fresh[:_MAX_WOKEN], self._fresh[_MAX_WOKEN:]
        # A reader whose client does not read does not wait for outputs, and so does not delay later rounds.
        self._busy_readers += sum([submission.wake_reader(self._round) for submission in fresh])
        self._continues = self._is_scheduled = bool(self._fresh)
        if self._continues:  # the event loop does other work between two batches
            self._loop.call_soon(self._wake_readers)

    def _record_waiting_again(self, round: int) -> None:
        if round == self._round and self._busy_readers:
            self._busy_readers -= 1
            if not self._busy_readers:
                self._round_seconds = self._loop.time() - self._round_began
