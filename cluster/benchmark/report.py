"""Report: latencies, throughput, goodput, errors and cached tokens of a run.

    TTFT  from due time to first token        TPOT  (last token - first token) / (tokens - 1), per request
    ITL   gap between two messages            E2E   from due time to last token

In an open loop a request is due at its arrival time, even if the client sent it late.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from coatcheck.cluster.benchmark.load_generator import Recording
from coatcheck.proto.stubs import coatcheck_pb2 as pb

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One answered request. Times are seconds since the start of the run. Token counts come from the server.

    `gaps`: seconds between messages. `arrivals`: (time, number of tokens) of each message.
    """

    due: float
    first: float
    last: float
    gaps: tuple[float, ...]
    arrivals: tuple[tuple[float, int], ...]
    prompt_tokens: int
    output_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    group: str

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def e2e(self) -> float:
        return self.last - self.due

    @property
    def tpot(self) -> float | None:
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class LatencyPercentiles:
    """Mean and percentiles in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `goodput`: requests per second that met every objective; None without objectives.

    `errors`: the number of requests by status. `error_messages`: what the server said of the first request of a status.
    `unfinished`: requests that were running or not yet sent when the run was interrupted. No other field counts them.
    """

    requests: int
    succeeded: int
    errors: dict[str, int]
    error_messages: dict[str, str]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: LatencyPercentiles | None
    tpot_ms: LatencyPercentiles | None
    itl_ms: LatencyPercentiles | None
    e2e_ms: LatencyPercentiles | None
    goodput: float | None
    within_slo: float | None
    groups: dict[str, int]
    client_cpu_us_per_token: float
    unfinished: int

    @property
    def success_rate(self) -> float:
        """Share of requests that were answered completely."""
        return self.succeeded / self.requests if self.requests else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "success_rate": self.success_rate}


def measure(recording: Recording) -> RequestSample | str:
    """The sample of a complete answer, or the name of the error."""
    if recording.status != "OK":
        return recording.status
    arrivals: list[tuple[float, int]] = []
    final = None
    for at, message in zip(recording.times, recording.messages, strict=True):
        event = pb.GenerateEvent.FromString(message)
        if event.HasField("delta"):
            # A delta with text alone follows its tokens; only tokens count.
            if event.delta.token_ids:
                arrivals.append((at, len(event.delta.token_ids)))
        elif event.HasField("final"):
            final = event.final
    tokens = sum(count for _, count in arrivals)
    if final is None or not tokens:
        return "INCOMPLETE"
    if tokens != recording.output_len:
        return "WRONG_LENGTH"
    times = [at for at, _ in arrivals]
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return RequestSample(
        due=recording.due, first=times[0], last=times[-1], gaps=gaps, arrivals=tuple(arrivals),
        prompt_tokens=final.usage.prompt_tokens, output_tokens=tokens,
        cached_device_tokens=final.usage.cached_device_tokens, cached_host_tokens=final.usage.cached_host_tokens,
        group=final.group,
    )  # fmt: skip


def summarize(
    measured: Sequence[RequestSample | str],
    seconds: float,
    *,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    cpu_seconds: float = 0.0,
    unfinished: int = 0,
    error_messages: Mapping[str, str] | None = None,
) -> Report:
    """The report of a run. An answer of one token has no TPOT and meets any TPOT objective."""
    samples = [sample for sample in measured if isinstance(sample, RequestSample)]
    output = sum(sample.output_tokens for sample in samples)
    prompt = sum(sample.prompt_tokens for sample in samples)
    within_slo = [
        sample
        for sample in samples
        if (slo_ttft_ms is None or sample.ttft * 1000 <= slo_ttft_ms)
        and (slo_tpot_ms is None or (sample.tpot or 0.0) * 1000 <= slo_tpot_ms)
    ]
    has_objectives = slo_ttft_ms is not None or slo_tpot_ms is not None
    return Report(
        requests=len(measured),
        succeeded=len(samples),
        errors=dict(Counter(error for error in measured if isinstance(error, str))),
        error_messages=dict(error_messages or {}),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_device_tokens=sum(sample.cached_device_tokens for sample in samples),
        cached_host_tokens=sum(sample.cached_host_tokens for sample in samples),
        requests_per_second=len(samples) / seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        ttft_ms=latency(sample.ttft for sample in samples),
        tpot_ms=latency(sample.tpot for sample in samples if sample.tpot is not None),
        itl_ms=latency(gap for sample in samples for gap in sample.gaps),
        e2e_ms=latency(sample.e2e for sample in samples),
        goodput=len(within_slo) / seconds if has_objectives else None,
        within_slo=len(within_slo) / len(measured) if has_objectives and measured else None,
        groups=dict(Counter(sample.group for sample in samples)),
        client_cpu_us_per_token=cpu_seconds / output * 1e6 if output else 0.0,
        unfinished=unfinished,
    )


def latency(seconds: Iterable[float]) -> LatencyPercentiles | None:
    """Mean and percentiles in milliseconds; None for no values."""
    values = np.fromiter(seconds, float) * 1000
    if not values.size:
        return None
    return LatencyPercentiles(float(values.mean()), *(float(value) for value in np.percentile(values, PERCENTILES)))
