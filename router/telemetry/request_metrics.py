"""RequestMetrics: what this router counts of its own requests, as Prometheus' counters and histograms.

Whoever does something calls the method that is named after it. It does not know groups' reports (see metrics) nor how
anything is served.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from coatcheck.proto.errors import Overloaded, status_name
from coatcheck.proto.stubs.coatcheck_pb2 import Usage

# Half an octave apart where readers feel it, an octave further out.
_TTFT: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80)
_TOKEN: Final = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_QUEUE: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_WHOLE: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Why somebody is refused: every series is there from the start, so that an alert sees the first.
REASONS: Final = (
    "unauthenticated", "permission_denied", "foreign_host", "long_body", "slow_body",
    "connections", "not_http", "slow_head", "long_head", "compressed_body",
    "too_many_streams", "rate_limit", "queue_full", "grammars_waiting", "long_requests",
)  # fmt: skip


class RequestMetrics:
    """Registers all of them; a router has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter: nobody asks for it
        self._requests = Counter(
            "coatcheck_requests",
            "Requests that have ended, by how: ok, cancelled by the client, or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self._tokens = Counter("coatcheck_tokens", "Tokens of whole answers.", ["kind"], registry=registry)
        self._ttft = Histogram("coatcheck_ttft_seconds", "Arrival to first token.", buckets=_TTFT, registry=registry)
        self._tpot = Histogram(
            "coatcheck_tpot_seconds",
            "Seconds a token after the first, one value for each answer.",
            buckets=_TOKEN,
            registry=registry,
        )
        self._itl = Histogram(
            "coatcheck_itl_seconds", "Between two deltas of a choice, as sent.", buckets=_TOKEN, registry=registry
        )
        self._queue = Histogram(
            "coatcheck_queue_seconds",
            "Arrival to the first step in a group.",
            buckets=_QUEUE,
            registry=registry,
        )
        self._whole = Histogram(
            "coatcheck_request_seconds", "Arrival to the end of the answer.", buckets=_WHOLE, registry=registry
        )
        self._failovers = Counter(
            "coatcheck_failovers",
            "Streams that lost their group after their first token; most went on at another.",
            ["group"],
            registry=registry,
        )
        self._retries = Counter(
            "coatcheck_retries",
            "Requests that lost their group before their first token; most were sent to another.",
            ["group"],
            registry=registry,
        )
        self._resumes = Counter(
            "coatcheck_resumes",
            "Requests that brought tokens which an earlier stream had delivered.",
            registry=registry,
        )
        self._refusals = Counter(
            "coatcheck_refusals",
            "What was refused at the door, before any of it was computed, by why: who it was, or how much it was.",
            ["reason"],
            registry=registry,
        )
        for kind in ("prompt", "cached_device", "cached_host", "completion"):
            self._tokens.labels(kind)
        for reason in REASONS:
            self._refusals.labels(reason)
        self._requests.labels("ok")

    def ended(self, error: BaseException | None, seconds: float) -> None:
        """A request is over; no error: all of it was answered."""
        self._requests.labels("ok" if error is None else status_name(error)).inc()
        if error is None:
            self._whole.observe(seconds)
        elif isinstance(error, Overloaded):
            self.refused(error.reason)

    def refused(self, reason: str) -> None:
        """Somebody was turned away."""
        self._refusals.labels(reason).inc()

    def answered(self, usage: Usage, ttft: float | None, tpot: float | None) -> None:
        """A whole answer; None: it had no first token, or no second."""
        for kind in ("prompt", "cached_device", "cached_host", "completion"):
            self._tokens.labels(kind).inc(getattr(usage, f"{kind}_tokens"))
        if ttft is not None:
            self._ttft.observe(ttft)
        if tpot is not None:
            self._tpot.observe(tpot)

    def delta(self, seconds: float) -> None:
        """A delta, so long after the choice's last."""
        self._itl.observe(seconds)

    def queued(self, seconds: float) -> None:
        """A group has begun with a request that arrived so long before."""
        self._queue.observe(seconds)

    def moved(self, group: str, *, begun: bool) -> None:
        """A request has lost its group; begun: some of its tokens are delivered."""
        (self._failovers if begun else self._retries).labels(group).inc()

    def resumed(self) -> None:
        """A request goes on where another stream ended."""
        self._resumes.inc()
