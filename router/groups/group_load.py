"""GroupLoad: a router's estimate of one group's load: the group's last report plus the submissions sent since.

A report says how many of this router's submissions it contains, counted from the beginning of the stream. The router
adds only the later ones to the report, however late it reads the report. Submissions of other routers appear in the
report only. There is one GroupLoad for each stream to a group, and its methods are called in the order of that stream.
Callers pass the time.
"""

from collections import OrderedDict
from math import exp
from typing import Final, NamedTuple

import numpy as np

from coatcheck.proto.stubs.worker_pb2 import Load, Registration
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.routing.routing_cost import Candidate

_BUSY_SECONDS: Final = 60.0  # time constant of the running average of the busy share
_OTHERS_SECONDS: Final = 10.0  # time constant of the running average of what other routers send
_MIN_OTHERS_RATE: Final = 0.01  # submissions per second; a router that sends fewer counts as gone
_REPORT_SECONDS: Final = 0.1  # time between two reports of a group that works: LOAD_SECONDS of the group's service
_REPORT_AGE: Final = _REPORT_SECONDS / 2  # mean age of the last report when a request is sent
# A group has room while its own queue is below two limits. Further requests wait in the router, which is fair to
# tenants and can still send them to the group that is free first.
#
# Limit of queued prompt tokens: what the group computes in _QUEUED_SECONDS, or one full step if that is more. The group
# then has work until its next report. With 1 s and two steps TTFT p90 was 10% longer in the mean of 283 simulations
# (bench/LOG.md).
_QUEUED_SECONDS: Final = 2 * _REPORT_SECONDS
_GUESSED_BATCH_TOKENS: Final = 2048
# Limit of waiting requests: max_num_seqs / _SLOTS_PER_WAITING, but at least _MIN_WAITING. They take the slots that
# become free before the next report.
_MIN_WAITING, _SLOTS_PER_WAITING = 4, 8
# A group returns a request if its queue is longer than this router predicted by more than it computes in this time. A
# return costs about as much: a round trip and another decision.
_RETURN_SECONDS: Final = 0.02


class _Unreported(NamedTuple):
    """A submission that has no output yet and is not contained in the last report."""

    tokens: int  # prompt tokens to compute
    choices: int  # not ended


class GroupLoad:
    """Call `apply_report` for each report and `add_submission` for each request sent, in the stream's order.

    `table`: where the load is written at `slot` whenever it changes; None: nowhere.
    """

    def __init__(self, registration: Registration, table: LoadTable | None = None, slot: int = 0) -> None:
        self.last_report = Load()
        self.slot = slot
        self._table = table
        self._block_size = registration.model.block_size
        self._max_batch_tokens = registration.max_batch_tokens
        self._free = registration.num_blocks * self._block_size  # tokens that fit into empty blocks
        self._evictable = 0  # tokens in cached blocks that no sequence uses
        # Fields of the last report as plain numbers, because every change of the load reads all of them.
        self._queued_tokens = self._waiting = self._running = 0
        self._rate = self._restore_rate = self._step_seconds = 0.0
        self._busy_share = 0.0
        self._last_prefill: tuple[float, float] | None = None  # (time of the last report, its prefill_seconds)
        self._submissions = 0  # on this stream
        self._others: tuple[float, int] | None = None  # (time of the last report, submissions of other routers)
        self._others_rate = 0.0  # submissions per second of other routers
        # By submission number. An OrderedDict, because a plain dict finds its first key by a scan of all deleted slots.
        self._unreported: OrderedDict[int, _Unreported] = OrderedDict()
        self._unreported_tokens = self._unreported_choices = 0  # sums over `_unreported`
        self._max_running = registration.max_num_seqs  # 0 if unknown
        self._max_waiting = max(self._max_running // _SLOTS_PER_WAITING, _MIN_WAITING)
        self._running_delta = 0  # choices that began to run since the last report, minus those that ended
        self._has_refused = False  # since the last report
        self._max_queued_tokens = self._queue_limit()
        self._write()

    def leave_table(self) -> None:
        """Clears the slot in the table, because the stream has ended. Later calls do not change the table."""
        if self._table is not None:
            self._table.clear(self.slot)
            self._table = None

    def apply_report(self, load: Load, now: float) -> None:
        """Replaces the last report. `now`: the event loop's time, in seconds."""
        self.last_report = load
        status = load.status
        self._queued_tokens, self._waiting = load.queued_prefill_tokens, status.waiting
        self._running = status.running
        self._running_delta = 0
        self._has_refused = False
        self._rate, self._restore_rate = status.prefill_tokens_per_second, status.restore_tokens_per_second
        self._step_seconds = status.step_seconds
        self._max_queued_tokens = self._queue_limit()
        self._free = (status.blocks_total - status.blocks_used - status.blocks_cached) * self._block_size
        self._evictable = status.blocks_cached * self._block_size
        self._update_busy_share(load.prefill_seconds, now)
        self._update_others_rate(load.all_submissions - load.submissions, now)
        while self._unreported and next(iter(self._unreported)) <= load.submissions:
            self._remove_unreported(next(iter(self._unreported)))
        self._write()

    def add_submission(self, uncached_tokens: int, choices: int = 1) -> int:
        """Records the stream's next submission and returns its number. `uncached_tokens`: prompt tokens that the group
        must compute."""
        self._submissions += 1
        self._unreported[self._submissions] = _Unreported(uncached_tokens, choices)
        self._unreported_tokens += uncached_tokens
        self._unreported_choices += choices
        self._write()
        return self._submissions

    def record_first_output(self, number: int) -> None:
        """Counts the choices of a submission with a first output as running, if no report contains the submission."""
        if number in self._unreported:
            self._running_delta += self._remove_unreported(number).choices
            self._write()

    def end_choices(self, number: int, count: int = 1) -> None:
        """Removes `count` choices of the submission, which are finished or aborted."""
        unreported = self._unreported.get(number)
        if unreported is None:
            self._running_delta -= count
        elif unreported.choices == count:
            self._remove_unreported(number)
        else:
            self._unreported[number] = unreported._replace(choices=unreported.choices - count)
            self._unreported_choices -= count
        self._write()

    def max_queued_tokens(self, predicted: float) -> int | None:
        """The Submit.max_queued_tokens of a submission that is sent now: with more prompt tokens queued, the group
        returns it. None if no other router sends requests to the group. `predicted`: prompt tokens that this router
        expects to be queued there."""
        return int(predicted + self._rate * _RETURN_SECONDS) if self._others_rate and self._rate else None

    def record_return(self, number: int, queued_tokens: int) -> None:
        """Updates the queue from a submission that the group has returned. `queued_tokens`: the prompt tokens queued
        there, which include this stream's submissions before `number`."""
        own = sum(unreported.tokens for other, unreported in self._unreported.items() if other < number)
        self._queued_tokens = max(queued_tokens - own, 0)
        self._write()

    def record_refusal(self) -> None:
        """Counts the group as full until its next report, because it has refused a request as Overloaded."""
        self._has_refused = True
        self._write()

    @property
    def is_full(self) -> bool:
        """Whether the admission queue sends the group no request, not even one whose prefix the group holds."""
        return bool(self.full_reason)

    @property
    def full_reason(self) -> str:
        """Why the group is full: more requests wait there than the limit, all slots are taken and the limit is reached,
        or the group has refused a request since its last report. "" if it is not full."""
        if self._has_refused:
            return "full: it has refused a request since its last load report"
        if self._waiting > self._max_waiting:
            return f"full: {self._waiting} sequences wait there; the limit is {self._max_waiting}"
        if not self._max_running:
            return ""
        sequences = max(self._running + self._running_delta, 0) + self._waiting + self._unreported_choices
        limit = self._max_running + self._max_waiting
        return f"full: {sequences} sequences run or wait there; the limit is {limit}" if sequences >= limit else ""

    @property
    def has_room(self) -> bool:
        """Whether the group should get another request now: it is not full, and has fewer queued prompt tokens than
        the limit (see _QUEUED_SECONDS)."""
        return not self.is_full and self._queued_tokens + self._unreported_tokens < self._max_queued_tokens

    def candidate(self, group: str = "") -> Candidate:
        """The group as a Candidate that holds nothing of the prompt."""
        return Candidate(
            group,
            self._queued_tokens + self._unreported_tokens,
            self._rate,
            self._restore_rate,
            self._step_seconds,
            self._max_batch_tokens,
            self._busy_share,
            self._free,
            self._evictable,
            max(self._running + self._running_delta, 0) + self._waiting + self._unreported_choices,
            self._others_rate * _REPORT_AGE,
            self.has_room,
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        unreported = self._unreported.values()
        assert self._unreported_tokens == sum(one.tokens for one in unreported), "sum of unreported tokens"
        assert self._unreported_choices == sum(one.choices for one in unreported), "sum of unreported choices"
        assert all(one.choices for one in unreported), "a submission whose choices have all ended is still counted"
        numbers = list(self._unreported)
        assert numbers == sorted(numbers) and max(numbers, default=0) <= self._submissions, "order of the stream"
        if self._table is not None:
            slots, nothing = np.array([self.slot]), np.zeros(1)
            (written,) = zip(*self._table.candidates(slots, slots, nothing, nothing, nothing)[1:], strict=True)
            assert written == self.candidate()[1:], "the table has another load"
            assert self._table.is_full[self.slot] == self.is_full

    def _write(self) -> None:
        if self._table is not None:
            self._table.write(self.slot, self.candidate(), is_full=self.is_full)

    def _remove_unreported(self, number: int) -> _Unreported:
        removed = self._unreported.pop(number)
        self._unreported_tokens -= removed.tokens
        self._unreported_choices -= removed.choices
        return removed

    def _queue_limit(self) -> float:
        """Prompt tokens that keep the group busy until the next report."""
        return max(self._rate * _QUEUED_SECONDS, self._max_batch_tokens or _GUESSED_BATCH_TOKENS)

    def _update_busy_share(self, prefill_seconds: float, now: float) -> None:
        if self._last_prefill is not None and (elapsed := now - self._last_prefill[0]) > 0:
            share = min((prefill_seconds - self._last_prefill[1]) / elapsed, 1.0)
            self._busy_share += (1 - exp(-elapsed / _BUSY_SECONDS)) * (share - self._busy_share)
        self._last_prefill = (now, prefill_seconds)

    def _update_others_rate(self, others: int, now: float) -> None:
        if self._others is not None and (elapsed := now - self._others[0]) > 0:
            rate = max(others - self._others[1], 0) / elapsed
            self._others_rate += (1 - exp(-elapsed / _OTHERS_SECONDS)) * (rate - self._others_rate)
            if self._others_rate < _MIN_OTHERS_RATE:
                self._others_rate = 0.0
        self._others = (now, others)
