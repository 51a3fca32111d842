"""RequestMetrics: counters and latencies of this router's own requests, for Prometheus and for `coatcheck status`.

What groups report is in prometheus_page.py.
"""

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from coatcheck.proto.errors import Overloaded, status_name
from coatcheck.proto.stubs.coatcheck_pb2 import LatencyStatus, Usage

_WINDOW_SECONDS: Final = 300.0
_OUTCOME_SECONDS: Final = 10.0  # outcomes are counted together for this long
_MAX_SAMPLES: Final = 8192
# Bucket limits in seconds: half an octave apart where users notice the difference, an octave elsewhere.
_TTFT: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80)
_TOKEN: Final = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_QUEUE: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_WHOLE: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_TOKEN_KINDS: Final = ("prompt", "cached_device", "cached_host", "completion")
# Why a request is refused. Every series exists from the start, so that an alert sees the first refusal.
REASONS: Final = (
    "unauthenticated", "permission_denied", "foreign_host", "long_body", "slow_body",
    "connections", "not_http", "slow_head", "long_head", "compressed_body",
    "too_many_streams", "rate_limit", "queue_full", "grammars_waiting", "long_requests",
)  # fmt: skip


class LatencyMetric:
    """One kind of latency: a histogram since the start, and percentiles of the last five minutes."""

    def __init__(self, histogram: Histogram, clock: Callable[[], float] = time.monotonic) -> None:
        self._histogram = histogram
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)  # when, seconds

    def record(self, seconds: float) -> None:
        self._histogram.observe(seconds)
        self._samples.append((self._clock(), seconds))

    def status(self) -> LatencyStatus:
        """Percentiles by nearest rank; all zero if nothing was recorded."""
        since = self._clock() - _WINDOW_SECONDS
        while self._samples and self._samples[0][0] < since:
            self._samples.popleft()
        ordered = sorted(seconds for _, seconds in self._samples)
        if not ordered:
            return LatencyStatus()
        p50, p90, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99))
        return LatencyStatus(p50_seconds=p50, p90_seconds=p90, p99_seconds=p99, count=len(ordered))


class RecentOutcomes:
    """Counts of the last five minutes, by outcome."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tallies: deque[tuple[float, Tally[str]]] = deque()  # since when, counts of 10 s

    def record(self, outcome: str) -> None:
        now = self._clock()
        if not self._tallies or now >= self._tallies[-1][0] + _OUTCOME_SECONDS:
            self._drop_old(now)
            self._tallies.append((now, Tally()))
        self._tallies[-1][1][outcome] += 1

    def counts(self) -> list[tuple[str, int]]:
        """(outcome, count) of the last five minutes, the most frequent first."""
        self._drop_old(self._clock())
        return sum((tally for _, tally in self._tallies), Tally[str]()).most_common()

    def _drop_old(self, now: float) -> None:
        while self._tallies and self._tallies[0][0] <= now - _WINDOW_SECONDS:
            self._tallies.popleft()


class RequestMetrics:
    """Registers all metrics; a router has one. `ttft`, `tpot`, `itl` and `queue` are recorded directly.

    `outcomes`: how the last requests ended, by the labels of coatcheck_requests_total, and for refused ones by those of
    coatcheck_refusals_total.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series
        self._requests = Counter(
            "coatcheck_requests",
            "Requests that have ended, by outcome: ok, cancelled, or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "coatcheck_tokens", "Tokens of requests that were answered completely.", ["kind"], registry=registry
        )

        def latency(name: str, help: str, buckets: Sequence[float]) -> LatencyMetric:
            return LatencyMetric(Histogram(f"coatcheck_{name}_seconds", help, buckets=buckets, registry=registry))

        self.ttft = latency("ttft", "Arrival to first token.", _TTFT)
        self.tpot = latency("tpot", "Seconds per token after the first, one value for each answer.", _TOKEN)
        self.itl = latency("itl", "Between two deltas of a choice, as sent.", _TOKEN)
        self.queue = latency("queue", "Arrival to the first step in a group.", _QUEUE)
        self._whole = Histogram(
            "coatcheck_request_seconds", "Arrival to the end of the answer.", buckets=_WHOLE, registry=registry
        )
        self._failovers = Counter(
            "coatcheck_failovers",
            "Streams that lost their group after their first token; most continue on another group.",
            ["group"],
            registry=registry,
        )
        self._retries = Counter(
            "coatcheck_retries",
            "Requests that lost their group before their first token; most are sent to another group.",
            ["group"],
            registry=registry,
        )
        self._resumes = Counter(
            "coatcheck_resumes",
            "Requests that continue after tokens which an earlier stream has delivered.",
            registry=registry,
        )
        self._refusals = Counter(
            "coatcheck_refusals",
            "Requests and connections refused before anything was computed, by reason.",
            ["reason"],
            registry=registry,
        )
        for kind in _TOKEN_KINDS:
            self._tokens.labels(kind)
        for reason in REASONS:
            self._refusals.labels(reason)
        self._requests.labels("ok")
        self._prompt_tokens = self._cached_tokens = 0
        self.outcomes = RecentOutcomes()

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that a cache held, since the start."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def record_end(self, error: BaseException | None, seconds: float) -> None:
        """A request has ended, `seconds` after its arrival; `error` is None if its whole answer was delivered."""
        outcome = "ok" if error is None else status_name(error)
        self._requests.labels(outcome).inc()
        if isinstance(error, Overloaded):
            self.record_refusal(error.reason)
            return
        self.outcomes.record(outcome)
        if error is None:
            self._whole.observe(seconds)

    def record_answer(self, usage: Usage, ttft: float | None, seconds: float) -> None:
        """A whole answer was delivered. `ttft`, `seconds`: from the arrival to its first token (None if it has none)
        and to its end."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_device_tokens + usage.cached_host_tokens
        for kind in _TOKEN_KINDS:
            self._tokens.labels(kind).inc(getattr(usage, f"{kind}_tokens"))
        if ttft is not None:
            self.ttft.record(ttft)
            if usage.completion_tokens > 1:
                self.tpot.record((seconds - ttft) / (usage.completion_tokens - 1))

    def record_refusal(self, reason: str) -> None:
        """A request or a connection was refused; `reason` is one of REASONS."""
        self._refusals.labels(reason).inc()
        self.outcomes.record(reason)

    def record_group_lost(self, group: str, *, has_begun: bool) -> None:
        """A request has lost its group; `has_begun`: some of its tokens were delivered."""
        (self._failovers if has_begun else self._retries).labels(group).inc()

    def record_resume(self) -> None:
        self._resumes.inc()
