"""GroupLoad: what a router believes of one group's load: the group's own last word, and what was sent since.

Every router hears the same reports, so that routers agree about what is older than a report; of what is newer each
knows its own part. Pure but for what it is told, times too. It does not know streams, hashes or costs.
"""

from collections import deque
from math import exp
from typing import Final

from ..proto.worker_pb2 import Load, Registration
from .policy import Candidate
from .prefix_index import NOTHING, Match

# A report may have been on its way when a submission was: only older ones are in it.
_REPORT_LAG: Final = 0.05
_BUSY_SECONDS: Final = 60.0  # of the running average of the busy share


class GroupLoad:
    """`report` and `sent` as they happen; `candidate` at any time."""

    def __init__(self, registration: Registration) -> None:
        self.last = Load()
        self._block_size = registration.model.block_size
        self._chunk = registration.max_batch_tokens
        self._free = registration.num_blocks * self._block_size
        self._cold = 0
        # Of the last report, as plain numbers: every decision reads them, of every group.
        self._queued_tokens = self._waiting = 0
        self._rate = self._restore_rate = self._step_seconds = 0.0
        self._busy = 0.0
        self._heard: tuple[float, float] | None = None  # when the last report came, and its prefill_seconds
        self._sent: deque[tuple[float, int]] = deque()  # (when, uncached tokens), not in the last report
        self._sent_tokens = 0

    def report(self, load: Load, now: float) -> None:
        """The group's word."""
        self.last = load
        status = load.status
        self._queued_tokens, self._waiting = load.queued_prefill_tokens, status.waiting
        self._rate, self._restore_rate = status.prefill_tokens_per_second, status.restore_tokens_per_second
        self._step_seconds = status.step_seconds
        self._free = (status.blocks_total - status.blocks_used - status.blocks_cached) * self._block_size
        self._cold = status.blocks_cached * self._block_size
        self._move_busy(load.prefill_seconds, now)
        while self._sent and self._sent[0][0] < now - _REPORT_LAG:
            self._sent_tokens -= self._sent.popleft()[1]

    def sent(self, uncached_tokens: int, now: float) -> None:
        """A prompt has been sent there."""
        self._sent.append((now, uncached_tokens))
        self._sent_tokens += uncached_tokens

    def candidate(self, group: str, match: Match = NOTHING) -> Candidate:
        """The group as the policy sees it, for a prompt of which it holds so much."""
        size = self._block_size
        device, host, expected = match
        return Candidate(
            group,
            self._queued_tokens + self._sent_tokens,
            self._waiting + len(self._sent),
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
        )

    def _move_busy(self, prefill_seconds: float, now: float) -> None:
        if self._heard is not None and (elapsed := now - self._heard[0]) > 0:
            share = min((prefill_seconds - self._heard[1]) / elapsed, 1.0)
            self._busy += (1 - exp(-elapsed / _BUSY_SECONDS)) * (share - self._busy)
        self._heard = (now, prefill_seconds)
