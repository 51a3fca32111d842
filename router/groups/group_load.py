"""GroupLoad: a router's estimate of one group's load: the group's last report plus the submissions sent since.

A report says how many of this router's submissions it contains, counted from the beginning of the stream. The router
adds only the later ones to the report, however late it reads the report. It does not know what other routers have sent
since. There is one GroupLoad for each stream to a group, and its methods are called in the order of that stream. It
reads no clock: callers pass the time.
"""

from collections import deque
from math import exp
from typing import Final

from coatcheck.proto.stubs.worker_pb2 import Load, Registration
from coatcheck.router.routing.prefix_match import NOTHING, PrefixMatch
from coatcheck.router.routing.routing_cost import Candidate

_BUSY_SECONDS: Final = 60.0  # of the running average of the busy share
# A group has room while its own queue is shorter than these limits: enough prompt tokens to fill its steps until its
# next report, and a waiting request for each seat that becomes free meanwhile. Further requests wait in the router,
# which is fair to tenants.
_AHEAD_SECONDS: Final = 1.0
_AHEAD_STEPS: Final = 2
_GUESSED_CHUNK: Final = 2048
_FEWEST_READY, _READY_SHARE = 4, 8


class Submission:
    """One request sent to the group. `number`: its place in the order of the stream, from 1.

    While `is_counted` is true, the router adds the prompt's `tokens` and the choices that have not ended to the queue
    that the group reported. It becomes false when a report contains the submission, when the first output arrives, or
    when all choices have ended.
    """

    __slots__ = ("_load", "_open", "is_counted", "number", "tokens")

    def __init__(self, load: "GroupLoad", number: int, tokens: int, choices: int) -> None:
        self._load = load
        self.number = number
        self.tokens = tokens
        self._open = (1 << choices) - 1  # a bit for each choice that has not ended
        self.is_counted = True

    @property
    def choices(self) -> int:
        """Number of choices that have not ended."""
        return self._open.bit_count()

    def mark_reported(self) -> None:
        """A report contains the submission, or its first output has arrived."""
        if self.is_counted:
            self.is_counted = False
            self._load.remove_unreported(self.tokens, self.choices)

    def begin(self) -> None:
        """The first output has arrived: the request runs."""
        if self.is_counted:
            self.mark_reported()
            self._load.change_running(self.choices)

    def end_choice(self, choice: int) -> None:
        """This choice is finished or aborted; a second call changes nothing."""
        if self._open >> choice & 1:
            self._end(1 << choice)

    def end(self) -> None:
        """All choices are finished or aborted."""
        if self._open:
            self._end(self._open)

    def _end(self, choices: int) -> None:
        ended = choices.bit_count()
        self._open &= ~choices
        if not self.is_counted:
            self._load.change_running(-ended)
        else:
            self.is_counted = bool(self._open)
            self._load.remove_unreported(0 if self.is_counted else self.tokens, ended)


class GroupLoad:
    """Call `report` for each report and `add_submission` for each request sent, in the stream's order."""

    def __init__(self, registration: Registration) -> None:
        self.last = Load()
        self._block_size = registration.model.block_size
        self._chunk = registration.max_batch_tokens
        self._free = registration.num_blocks * self._block_size
        self._cold = 0
        # Of the last report, as plain numbers: every decision reads them, of every group.
        self._queued_tokens = self._waiting = self._running = 0
        self._rate = self._restore_rate = self._step_seconds = 0.0
        self._busy = 0.0
        self._heard: tuple[float, float] | None = None  # when the last report came, and its prefill_seconds
        self._unreported: deque[Submission] = deque()  # not in the last report; some of them run or have ended
        self._submissions = 0  # on this stream
        # Sums over those in `_unreported` whose `is_counted` is true.
        self._unreported_tokens = self._unreported_choices = 0
        self._seats = registration.max_num_seqs
        self._ready = max(self._seats // _READY_SHARE, _FEWEST_READY)
        self._begun = 0  # choices that began since the last report, less those that ended
        self._refuses = False
        self._most_queued = self._ahead()

    def report(self, load: Load, now: float) -> None:
        """Replaces the last report. `now`: the event loop's time, in seconds."""
        self.last = load
        status = load.status
        self._queued_tokens, self._waiting = load.queued_prefill_tokens, status.waiting
        self._running = status.running
        self._begun = 0
        self._refuses = False
        self._rate, self._restore_rate = status.prefill_tokens_per_second, status.restore_tokens_per_second
        self._step_seconds = status.step_seconds
        self._most_queued = self._ahead()
        self._free = (status.blocks_total - status.blocks_used - status.blocks_cached) * self._block_size
        self._cold = status.blocks_cached * self._block_size
        self._move_busy(load.prefill_seconds, now)
        unreported = self._unreported
        while unreported and (unreported[0].number <= load.submissions or not unreported[0].is_counted):
            unreported.popleft().mark_reported()

    def add_submission(self, uncached_tokens: int, choices: int = 1) -> Submission:
        """Records the stream's next submission. `uncached_tokens`: prompt tokens that the group must compute."""
        self._submissions += 1
        submission = Submission(self, self._submissions, uncached_tokens, choices)
        self._unreported.append(submission)
        self._unreported_tokens += uncached_tokens
        self._unreported_choices += choices
        return submission

    def remove_unreported(self, tokens: int, choices: int) -> None:
        """Takes these out of the sums that are added to the reported queue. Called by Submission only."""
        self._unreported_tokens -= tokens
        self._unreported_choices -= choices

    def change_running(self, delta: int) -> None:
        """`delta`: change in the number of running choices since the last report. Called by Submission only."""
        self._begun += delta

    def refused(self) -> None:
        """The group has refused a request as Overloaded: it counts as full until its next report."""
        self._refuses = True

    @property
    def is_full(self) -> bool:
        """Whether the group gets no request at all, not even one whose prefix it holds: all seats are taken and the
        limit of waiting requests is reached, or it has refused a request since its last report."""
        if self._refuses or self._waiting > self._ready:
            return True
        running = max(self._running + self._begun, 0)
        return bool(self._seats) and running + self._waiting + self._unreported_choices >= self._seats + self._ready

    @property
    def has_room(self) -> bool:
        """Whether the group should get another request now: it is not full, and fewer prompt tokens are queued there
        than it computes until its next report."""
        return not self.is_full and self._queued_tokens + self._unreported_tokens < self._most_queued

    def candidate(self, group: str, match: PrefixMatch = NOTHING) -> Candidate:
        """The group as the policy sees it. `match`: blocks of the prompt that the group holds."""
        size = self._block_size
        device, host, expected = match
        coming = self._waiting + self._unreported_choices
        return Candidate(
            group,
            self._queued_tokens + self._unreported_tokens,
            coming,
            self._rate,
            self._restore_rate,
            self._step_seconds,
            self._chunk,
            self._busy,
            self._free,
            self._cold,
            device * size,
            host * size,
            expected * size,
            max(self._running + self._begun, 0) + coming,
            self.has_room,
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        counted = [submission for submission in self._unreported if submission.is_counted]
        assert self._unreported_tokens == sum(submission.tokens for submission in counted), "unreported tokens"
        assert self._unreported_choices == sum(submission.choices for submission in counted), "unreported choices"
        assert all(submission.choices for submission in counted), "a request that has ended is still counted"
        numbers = [submission.number for submission in self._unreported]
        assert numbers == sorted(set(numbers)) and max(numbers, default=0) <= self._submissions, "order of the stream"

    def _ahead(self) -> float:
        """Prompt tokens that keep the group busy until the next report."""
        return max(self._rate * _AHEAD_SECONDS, (self._chunk or _GUESSED_CHUNK) * _AHEAD_STEPS)

    def _move_busy(self, prefill_seconds: float, now: float) -> None:
        if self._heard is not None and (elapsed := now - self._heard[0]) > 0:
            share = min((prefill_seconds - self._heard[1]) / elapsed, 1.0)
            self._busy += (1 - exp(-elapsed / _BUSY_SECONDS)) * (share - self._busy)
        self._heard = (now, prefill_seconds)
