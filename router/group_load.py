"""GroupLoad: what a router believes of one group's load: its last report, and the requests sent that it lacks.

A report says how many of this router's submissions it contains, counted from the beginning of the stream. The router
adds only the later ones to the report, however late it reads the report. It does not know what other routers sent since
the report. There is one GroupLoad for each stream to a group, and its methods are called in the order of that stream.
It reads no clock: callers pass the time.
"""

from collections import deque
from math import exp
from typing import Final

from ..proto.worker_pb2 import Load, Registration
from .policy import Candidate
from .prefix_match import NOTHING, Match

_BUSY_SECONDS: Final = 60.0  # of the running average of the busy share
# A group has room while its own queue is no longer than that: enough to fill its steps until its next report, and to
# have somebody ready for each place that comes free meanwhile; more waits with the router, where turns are fair.
_AHEAD_SECONDS: Final = 1.0
_AHEAD_STEPS: Final = 2
_GUESSED_CHUNK: Final = 2048
_FEWEST_READY, _READY_SHARE = 4, 8


class Sent:
    """One submission, the stream's `number`-th.

    While `counts` is true, the router adds the prompt's `tokens` and the choices that have not ended to the group's
    reported queue. It is false once a report contains the submission, an answer begins, or all choices have ended.
    """

    __slots__ = ("_load", "_open", "counts", "number", "tokens")

    def __init__(self, load: "GroupLoad", number: int, tokens: int, choices: int) -> None:
        self._load = load
        self.number = number
        self.tokens = tokens
        self._open = (1 << choices) - 1  # a bit for each choice that has not ended
        self.counts = True

    @property
    def choices(self) -> int:
        """How many have not ended."""
        return self._open.bit_count()

    def reported(self) -> None:
        """A report contains it."""
        if self.counts:
            self.counts = False
            self._load.uncount(self.tokens, self.choices)

    def begin(self) -> None:
        """It is being answered."""
        if self.counts:
            self.reported()
            self._load.run(self.choices)

    def end_choice(self, choice: int) -> None:
        """This choice has been answered, or is wanted no longer; a second call changes nothing."""
        if self._open >> choice & 1:
            self._end(1 << choice)

    def end(self) -> None:
        """All of its choices have been answered, or are wanted no longer."""
        if self._open:
            self._end(self._open)

    def _end(self, choices: int) -> None:
        ended = choices.bit_count()
        self._open &= ~choices
        if not self.counts:
            self._load.run(-ended)
        else:
            self.counts = bool(self._open)
            self._load.uncount(0 if self.counts else self.tokens, ended)


class GroupLoad:
    """`report` and `sent` as they happen; `candidate` at any time."""

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
        self._sent: deque[Sent] = deque()  # not in the last report; some of them have begun or ended
        self._submissions = 0  # on this stream
        # Sums over those in `_sent` whose `counts` is true.
        self._sent_tokens = self._sent_choices = 0
        self._seats = registration.max_num_seqs
        self._ready = max(self._seats // _READY_SHARE, _FEWEST_READY)
        self._begun = 0  # less those that have ended, since the last report
        self._refuses = False
        self._most_queued = self._ahead()

    def report(self, load: Load, now: float) -> None:
        """The group's word."""
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
        while self._sent and (self._sent[0].number <= load.submissions or not self._sent[0].counts):
            self._sent.popleft().reported()

    def sent(self, uncached_tokens: int, choices: int = 1) -> Sent:
        """Records the next submission of the stream; `uncached_tokens` of its prompt are to be computed."""
        self._submissions += 1
        sent = Sent(self, self._submissions, uncached_tokens, choices)
        self._sent.append(sent)
        self._sent_tokens += uncached_tokens
        self._sent_choices += choices
        return sent

    def uncount(self, tokens: int, choices: int) -> None:
        """Adds these to the reported queue no longer. Called by Sent only."""
        self._sent_tokens -= tokens
        self._sent_choices -= choices

    def run(self, delta: int) -> None:
        """`delta`: change in the number of running choices since the last report. Called by Sent only."""
        self._begun += delta

    def refused(self) -> None:
        """It has said that it is full; until its next report it has no room."""
        self._refuses = True

    @property
    def is_full(self) -> bool:
        """Whether the group gets no request, not even one whose prefix it holds, until a sequence there ends or the
        next report comes. All seats are taken and as many requests wait as may, or the group has refused one."""
        if self._refuses or self._waiting > self._ready:
            return True
        running = max(self._running + self._begun, 0)
        return bool(self._seats) and running + self._waiting + self._sent_choices >= self._seats + self._ready

    @property
    def has_room(self) -> bool:
        """Whether one more request would start soon, or is needed to keep the group busy. A group that is not full has
        no room while enough prompt tokens are queued there."""
        return not self.is_full and self._queued_tokens + self._sent_tokens < self._most_queued

    def candidate(self, group: str, match: Match = NOTHING) -> Candidate:
        """The group as the policy sees it, for a prompt of which it holds so much."""
        size = self._block_size
        device, host, expected = match
        coming = self._waiting + self._sent_choices
        return Candidate(
            group,
            self._queued_tokens + self._sent_tokens,
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
        counted = [sent for sent in self._sent if sent.counts]
        assert self._sent_tokens == sum(sent.tokens for sent in counted), "the tokens of what was sent are miscounted"
        assert self._sent_choices == sum(sent.choices for sent in counted), "the choices sent are miscounted"
        assert all(sent.choices for sent in counted), "a request that has ended still counts"
        numbers = [sent.number for sent in self._sent]
        assert numbers == sorted(set(numbers)) and max(numbers, default=0) <= self._submissions, "sent out of order"

    def _ahead(self) -> float:
        """Prompt tokens that keep it busy until it can be given more."""
        return max(self._rate * _AHEAD_SECONDS, (self._chunk or _GUESSED_CHUNK) * _AHEAD_STEPS)

    def _move_busy(self, prefill_seconds: float, now: float) -> None:
        if self._heard is not None and (elapsed := now - self._heard[0]) > 0:
            share = min((prefill_seconds - self._heard[1]) / elapsed, 1.0)
            self._busy += (1 - exp(-elapsed / _BUSY_SECONDS)) * (share - self._busy)
        self._heard = (now, prefill_seconds)
