"""GroupLoad: what a router believes of one group's load: the group's own last word, and what was sent since.

Every router hears the same reports, so that routers agree about what is older than a report; of what is newer each
knows its own part. Pure but for what it is told, times too. It does not know streams, hashes or costs.
"""

from collections import deque
from math import exp
from typing import Final

from ..proto.worker_pb2 import Load, Registration
from .policy import Candidate
from .prefix_match import NOTHING, Match

# A report may have been on its way when a submission was: only older ones are in it.
_REPORT_LAG: Final = 0.05
_BUSY_SECONDS: Final = 60.0  # of the running average of the busy share
# A group has room while its own queue is no longer than that: enough to fill its steps until its next report, and to
# have somebody ready for each place that comes free meanwhile; more waits with the router, where turns are fair.
_AHEAD_SECONDS: Final = 1.0
_AHEAD_STEPS: Final = 2
_GUESSED_CHUNK: Final = 2048
_FEWEST_READY, _READY_SHARE = 4, 8


class Sent:
    """One prompt that was sent; `tokens` of it are believed to be ahead of others there, until it begins to answer or
    is in a report."""

    __slots__ = ("_load", "at", "counts", "ended", "tokens")

    def __init__(self, load: "GroupLoad", at: float, tokens: int) -> None:
        self._load = load
        self.at = at
        self.tokens = tokens
        self.counts = True  # among those that are ahead of others
        self.ended = False

    def reported(self) -> None:
        """The group counts it by now."""
        if self.counts:
            self.counts = False
            self._load.forget(self.tokens)

    def begin(self) -> None:
        """It is being answered."""
        if self.counts:
            self.reported()
            self._load.run(1)

    def end(self) -> None:
        """It has been answered, or is wanted no longer."""
        if not self.ended:
            self.ended = True
            if self.counts:
                self.reported()
            else:
                self._load.run(-1)


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
        self._sent: deque[Sent] = deque()  # not in the last report
        self._sent_tokens = self._sent_requests = 0
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
        while self._sent and (self._sent[0].at < now - _REPORT_LAG or not self._sent[0].counts):
            self._sent.popleft().reported()

    def sent(self, uncached_tokens: int, now: float) -> Sent:
        """A prompt has been sent there."""
        sent = Sent(self, now, uncached_tokens)
        self._sent.append(sent)
        self._sent_tokens += uncached_tokens
        self._sent_requests += 1
        return sent

    def forget(self, tokens: int) -> None:
        """One that was sent does not count any more: only Sent says so, and once."""
        self._sent_tokens -= tokens
        self._sent_requests -= 1

    def run(self, more: int) -> None:
        """So many more, or fewer, run than the last report says: only Sent says so."""
        self._begun += more

    def refused(self) -> None:
        """It has said that it is full; until its next report it has no room."""
        self._refuses = True

    @property
    def refuses(self) -> bool:
        """Whether it takes nothing until its next report."""
        return self._refuses

    @property
    def has_room(self) -> bool:
        """Whether one more would start soon, or at least keep it busy."""
        if self._refuses or self._waiting > self._ready:
            return False
        running = max(self._running + self._begun, 0)
        if self._seats and running + self._waiting + self._sent_requests >= self._seats + self._ready:
            return False
        return self._queued_tokens + self._sent_tokens < self._most_queued

    def candidate(self, group: str, match: Match = NOTHING) -> Candidate:
        """The group as the policy sees it, for a prompt of which it holds so much."""
        size = self._block_size
        device, host, expected = match
        coming = self._waiting + self._sent_requests
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

    def _ahead(self) -> float:
        """Prompt tokens that keep it busy until it can be given more."""
        return max(self._rate * _AHEAD_SECONDS, (self._chunk or _GUESSED_CHUNK) * _AHEAD_STEPS)

    def _move_busy(self, prefill_seconds: float, now: float) -> None:
        if self._heard is not None and (elapsed := now - self._heard[0]) > 0:
            share = min((prefill_seconds - self._heard[1]) / elapsed, 1.0)
            self._busy += (1 - exp(-elapsed / _BUSY_SECONDS)) * (share - self._busy)
        self._heard = (now, prefill_seconds)
