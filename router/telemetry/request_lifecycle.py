"""RequestLifecycle: one request from its arrival to its end, as metrics, spans and the log describe it.

The code that serves a request calls a method for each event of the request; this module alone decides what is
measured, traced and logged. Without tracing this costs a few clock readings. The spans of a request are

    router.request ─ router.admission, router.queue, router.route, group.submit (again for each group that it moves to)

and the group's own spans are children of its group.submit.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coatcheck.proto.errors import status_name
from coatcheck.proto.stubs.coatcheck_pb2 import Timings, Usage
from coatcheck.proto.stubs.worker_pb2 import FirstOutput
from coatcheck.proto.tracing import NO_TRACE_CONTEXT, Tracing, Value
from coatcheck.router.routing.routing_cost import Decision
from coatcheck.router.telemetry.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)


class RequestLifecycle:
    """Create it when the request arrives, and call `record_end` once, whatever happened.

    `trace_context`: the client's trace context, as headers.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        tracing: Tracing | None = None,
        request_id: str = "",
        trace_context: Mapping[str, str] = NO_TRACE_CONTEXT,
    ) -> None:
        self._metrics = metrics
        self._spans = _Spans(tracing, trace_context) if tracing is not None else None
        self._request_id = request_id
        self._clock = time.monotonic
        self._arrived = self._clock()
        self._sent = 0.0  # when the request was sent to its present group
        self._ttft: float | None = None
        self._last_delta: dict[int, float] = {}  # time by choice
        self._group = ""
        self._moves = 0
        self._queue_seconds: float | None = None
        if self._spans is not None:
            self._spans.start_part("router.admission")

    @property
    def trace_context(self) -> Mapping[str, str]:
        """Trace context for the group; empty without tracing."""
        return self._spans.trace_context if self._spans is not None else NO_TRACE_CONTEXT

    def record_admitted(self, request_id: str, prompt_tokens: int, *, is_resumed: bool) -> None:
        """The request is valid; it waits for a group."""
        self._request_id = request_id
        if is_resumed:
            self._metrics.record_resume()
        if self._spans is not None:
            self._spans.set_attributes(prompt_tokens=prompt_tokens)
            self._spans.start_part("router.queue")

    def record_routing(self) -> None:
        if self._spans is not None:
            self._spans.start_part("router.route")

    def record_sent(self, decision: Decision, moves: int) -> None:
        """The request is sent to the group of `decision`, after `moves` other groups."""
        self._group = decision.group
        self._moves = moves
        self._sent = self._clock()
        if self._spans is not None:
            chosen = decision.chosen
            self._spans.set_attributes(
                group=decision.group,
                candidates=len(decision.table.groups),
                cost_seconds=chosen.total_seconds,
                cached_tokens=chosen.cached_tokens,
            )
            self._spans.start_part("group.submit", "CLIENT", group=decision.group, attempt=moves)

    def record_first_output(self, first_output: FirstOutput) -> None:
        """The first group has computed the prompt; `first_output` says how long the request had waited there."""
        if self._queue_seconds is None:
            self._queue_seconds = self._sent - self._arrived + first_output.queued_seconds
            self._metrics.queue.record(self._queue_seconds)

    def record_delta(self, choice: int) -> None:
        """A delta of the choice is sent to the client."""
        now = self._clock()
        if self._ttft is None:
            self._ttft = now - self._arrived
        if (last := self._last_delta.get(choice)) is not None:
            self._metrics.itl.record(now - last)
        self._last_delta[choice] = now

    def timings(self) -> Timings | None:
        """The times of a request whose last delta is sent; None if it has no delta."""
        if self._ttft is None:
            return None
        queue = min(self._queue_seconds or 0.0, self._ttft)  # the group measures its part with its own clock
        last = max(self._last_delta.values()) - self._arrived
        return Timings(
            queue_seconds=queue, first_token_seconds=self._ttft - queue, generation_seconds=last - self._ttft
        )

    def record_group_lost(self, group: str, reason: str) -> None:
        """The request's group is lost; the request continues elsewhere, or fails."""
        self._metrics.record_group_lost(group, has_begun=self._ttft is not None)
        fields = {"request_id": self._request_id, "group": group, "reason": reason}
        _log.warning("a request lost its group", extra=fields)
        if self._spans is not None:
            self._spans.end_part(reason)
            self._spans.start_part("router.queue")

    def record_end(self, usage: Usage | None, error: BaseException | None) -> None:
        """The request has ended; without an `error` its whole answer was delivered."""
        seconds = self._clock() - self._arrived
        usage = usage or Usage()
        if error is None:
            self._metrics.record_answer(usage, self._ttft, seconds)
        self._metrics.record_end(error, seconds)
        outcome = "ok" if error is None else status_name(error)
        fields: dict[str, Value] = {
            "request_id": self._request_id,
            "group": self._group,
            "moves": self._moves,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_device_tokens + usage.cached_host_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        if self._spans is not None:
            self._spans.end_request("" if error is None else outcome, **fields)
        if not _log.isEnabledFor(logging.INFO):
            return
        fields |= {"outcome": outcome, "seconds": round(seconds, 4)}
        if self._ttft is not None:
            fields["ttft_seconds"] = round(self._ttft, 4)
        if error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
            fields["reason"] = str(error)[:200]
        _log.info("request ended", extra=fields)


class _Spans:
    """A request's span, and its parts one after another."""

    def __init__(self, tracing: Tracing, trace_context: Mapping[str, str]) -> None:
        self._tracing = tracing
        self._request = tracing.start_span("router.request", tracing.extract_context(trace_context), kind="SERVER")
        self._part: Span | None = None

    @property
    def trace_context(self) -> Mapping[str, str]:
        """Trace context for another process that works on the present part."""
        return self._tracing.inject_context(self._part or self._request)

    def start_part(self, name: str, kind: str = "INTERNAL", **attributes: Value) -> None:
        """Ends the present part and begins the next one."""
        self.end_part()
        self._part = self._tracing.start_span(name, self._tracing.child_context(self._request), kind=kind)
        self._part.set_attributes(attributes)

    def set_attributes(self, **attributes: Value) -> None:
        if self._part is not None:
            self._part.set_attributes(attributes)

    def end_part(self, failure: str = "") -> None:
        if self._part is not None:
            _end_span(self._part, failure)
            self._part = None

    def end_request(self, failure: str, **attributes: Value) -> None:
        self.end_part(failure)
        self._request.set_attributes(attributes)
        _end_span(self._request, failure)


def _end_span(span: "Span", failure: str) -> None:
    if failure:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, failure)
    span.end()
