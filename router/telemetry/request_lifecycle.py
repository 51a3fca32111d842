"""RequestLifecycle: one request's way through this router, as metrics, spans and the log have it.

Whoever moves the request on says so here; what is measured, traced and logged of it is decided here alone. Without
tracing it costs a few clock readings. It does not know why a request goes where it goes.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coatcheck.proto.errors import status_name
from coatcheck.proto.stubs.coatcheck_pb2 import Usage
from coatcheck.proto.stubs.worker_pb2 import Cached
from coatcheck.proto.tracing import NO_PARENT
from coatcheck.router.routing.routing_cost import Decision
from coatcheck.router.telemetry.request_trace import RequestTrace
from coatcheck.router.telemetry.traffic import Traffic

if TYPE_CHECKING:
    from coatcheck.proto.tracing import Tracing

_log = logging.getLogger(__name__)


class RequestLifecycle:
    """Made when the request arrives; `ended` is called once, whatever happened."""

    def __init__(
        self,
        traffic: Traffic,
        tracing: "Tracing | None" = None,
        request_id: str = "",
        carrier: Mapping[str, str] = NO_PARENT,
    ) -> None:
        self._traffic = traffic
        self._trace = RequestTrace(tracing, carrier) if tracing is not None else None
        self._request_id = request_id
        self._clock = time.monotonic
        self._arrived = self._clock()
        self._sent = 0.0  # to the group that has it
        self._ttft: float | None = None
        self._last: dict[int, float] = {}  # when a choice had its last delta
        self._group = ""
        self._moves = 0
        self._queued = False
        if self._trace is not None:
            self._trace.enter("router.admission")

    def admitted(self, request_id: str, prompt_tokens: int, *, resumed: bool) -> None:
        """It is well formed; it waits for a group."""
        self._request_id = request_id
        if resumed:
            self._traffic.measures.resumed()
        if self._trace is not None:
            self._trace.note(prompt_tokens=prompt_tokens)
            self._trace.enter("router.queue")

    def routing(self) -> None:
        """There are groups to choose from."""
        if self._trace is not None:
            self._trace.enter("router.route")

    def routed(self, decision: Decision, attempt: int) -> None:
        """It goes to this group, its next after so many."""
        self._group = decision.group
        self._moves = attempt
        self._sent = self._clock()
        if self._trace is not None:
            chosen = decision.chosen
            self._trace.note(
                group=decision.group,
                candidates=len(decision.terms),
                cost_seconds=chosen.total,
                cached_tokens=chosen.cached_tokens,
            )
            self._trace.enter("group.submit", "CLIENT", group=decision.group, attempt=attempt)

    def carrier(self) -> Mapping[str, str]:
        """Trace context for the group; empty when nobody traces."""
        return self._trace.carrier() if self._trace is not None else NO_PARENT

    def computing(self, cached: Cached) -> None:
        """The group has begun, after waiting so long."""
        if not self._queued:
            self._queued = True
            self._traffic.queued(self._sent - self._arrived + cached.queued_seconds)

    def delta(self, choice: int) -> None:
        """A delta of it goes to the client."""
        now = self._clock()
        if self._ttft is None:
            self._ttft = now - self._arrived
        if (last := self._last.get(choice)) is not None:
            self._traffic.delta(now - last)
        self._last[choice] = now

    def lost(self, group: str, why: str) -> None:
        """Its group is gone; it goes on elsewhere, or fails."""
        self._traffic.measures.moved(group, begun=self._ttft is not None)
        fields = {"request_id": self._request_id, "group": group, "reason": why}
        _log.warning("a request lost its group", extra=fields)
        if self._trace is not None:
            self._trace.leave(why)
            self._trace.enter("router.queue")

    def ended(self, usage: Usage | None, error: BaseException | None) -> None:
        """It is over; without an error all of it was delivered."""
        seconds = self._clock() - self._arrived
        usage = usage or Usage()
        if error is None:
            self._traffic.answered(usage, self._ttft, seconds)
        self._traffic.measures.ended(error, seconds)
        outcome = "ok" if error is None else status_name(error)
        self._write_log(outcome, usage, seconds, error)
        if self._trace is not None:
            self._trace.end(
                "" if error is None else outcome,
                request_id=self._request_id,
                group=self._group,
                moves=self._moves,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_device_tokens + usage.cached_host_tokens,
            )

    def _write_log(self, outcome: str, usage: Usage, seconds: float, error: BaseException | None) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": self._request_id,
            "outcome": outcome,
            "group": self._group,
            "moves": self._moves,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_device_tokens + usage.cached_host_tokens,
            "completion_tokens": usage.completion_tokens,
            "seconds": round(seconds, 4),
        }
        if self._ttft is not None:
            fields["ttft_seconds"] = round(self._ttft, 4)
        if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
            fields["reason"] = str(error)[:200]
        _log.info("request ended", extra=fields)
