"""Traffic: what this router is carrying, how fast it has been lately, and whether it takes more.

It does not know groups; it counts. What it counts since the start is for Prometheus (see measures).
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from coatcheck.proto.errors import Draining, Overloaded
from coatcheck.proto.stubs.coatcheck_pb2 import LatencyStatus, Usage
from coatcheck.router.access.tenant import ANYONE, Tenant
from coatcheck.router.telemetry.request_metrics import RequestMetrics

_WINDOW_SECONDS: Final = 300.0
_MOST_SAMPLES: Final = 8192


class LatencyWindow:
    """Percentiles of what was recorded lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=_MOST_SAMPLES)

    def record(self, seconds: float) -> None:
        """Adds one measurement, now."""
        self._samples.append((self._clock(), seconds))

    def status(self) -> LatencyStatus:
        """Over the window; nearest rank, all zero when nothing was recorded."""
        since = self._clock() - _WINDOW_SECONDS
        while self._samples and self._samples[0][0] < since:
            self._samples.popleft()
        ordered = sorted(seconds for _, seconds in self._samples)
        if not ordered:
            return LatencyStatus()
        p50, p90, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99))
        return LatencyStatus(p50_seconds=p50, p90_seconds=p90, p99_seconds=p99, count=len(ordered))


class Traffic:
    """Open requests, latencies and the share of prompt tokens that caches held."""

    def __init__(self, measures: RequestMetrics) -> None:
        self.measures = measures
        self.active = 0
        self.draining = False
        self.ttft = LatencyWindow()
        self.tpot = LatencyWindow()
        self._streams: Counter[str] = Counter()  # open ones, by tenant
        self.itl = LatencyWindow()
        self.queue = LatencyWindow()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self, tenant: Tenant = ANYONE) -> Iterator[None]:
        """Counts one request while it is open; raises Draining when no new ones are taken, and Overloaded when the
        tenant has as many open as it may."""
        if self.draining:
            raise Draining("this router is draining and takes no new requests; send this one to another")
        if tenant.max_streams is not None and self._streams[tenant.name] >= tenant.max_streams:
            raise Overloaded(
                f"{tenant.name!r} has {tenant.max_streams} requests open, as many as it may; try again when one ends",
                reason="too_many_streams",
            )
        self.active += 1
        self._streams[tenant.name] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            self._streams[tenant.name] -= 1
            if not self._streams[tenant.name]:
                del self._streams[tenant.name]
            if not self.active:
                self._idle.set()

    async def idle(self) -> None:
        """Waits until no request is open."""
        await self._idle.wait()

    def answered(self, usage: Usage, ttft: float | None, seconds: float) -> None:
        """Records a whole answer: its first token after `ttft`, all of it after `seconds`."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_device_tokens + usage.cached_host_tokens
        tpot = None
        if ttft is not None:
            self.ttft.record(ttft)
            if usage.completion_tokens > 1:
                tpot = (seconds - ttft) / (usage.completion_tokens - 1)
                self.tpot.record(tpot)
        self.measures.answered(usage, ttft, tpot)

    def delta(self, seconds: float) -> None:
        """Records a delta, so long after its choice's last."""
        self.itl.record(seconds)
        self.measures.delta(seconds)

    def queued(self, seconds: float) -> None:
        """Records that a group has begun with a request, so long after it arrived."""
        self.queue.record(seconds)
        self.measures.queued(seconds)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens found in a cache, since the start."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
