"""RequestLog: the log line and the trace spans of each request, under the id that its router gave it.

    engine.queue ─ engine.prefill ─ engine.decode     for each choice, below the router's span group.submit

Methods are called in the engine's thread, or in the service's thread before the engine has the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coatcheck.proto.tracing import Tracing
from coatcheck.workers.core.step_output import SequenceOutput

if TYPE_CHECKING:
    from opentelemetry.context import Context

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoggedRequest:
    """The log's record of one request. Times are Unix times in nanoseconds."""

    request_id: str
    prompt_tokens: int
    parent: Context | None  # None: the request is not traced
    arrived_at: int
    first_token_at: dict[int, int] = field(default_factory=dict)  # by choice
    num_tokens: dict[int, int] = field(default_factory=dict)  # by choice
    cache_fields: dict[str, str | int | float] = field(default_factory=dict)  # see _cache_fields


class RequestLog:
    """Call `open_request`, then `record_output` for each output, then `close_request`."""

    def __init__(self, group: str, tracing: Tracing | None = None) -> None:
        self._group = group
        self._tracing = tracing

    def open_request(self, request_id: str, prompt_tokens: int, trace_context: Mapping[str, str]) -> LoggedRequest:
        """Start the record of a request. `trace_context`: the router's W3C trace context."""
        traced = self._tracing is not None and trace_context.get("traceparent")
        parent = self._tracing.extract_context(trace_context) if self._tracing is not None and traced else None
        return LoggedRequest(request_id, prompt_tokens, parent, time.time_ns())

    def record_output(self, record: LoggedRequest, output: SequenceOutput) -> None:
        """Count an output's tokens, and record the spans that end with it."""
        choice = output.choice
        if output.token_ids:
            record.num_tokens[choice] = record.num_tokens.get(choice, 0) + len(output.token_ids)
        if choice == 0 and output.cached_device_tokens >= 0:
            record.cache_fields = _cache_fields(output)
        if record.parent is None:
            return
        now = time.time_ns()
        if output.cached_device_tokens >= 0:
            self._record_prefill(record, output, now)
        if output.finish_reason is not None:
            self._record_decode(record, choice, now, output.finish_reason.name.lower())

    def close_request(self, record: LoggedRequest, outcome: str) -> None:
        """Write the request's log line. `outcome`: "ok", "aborted", or "refused: ..."."""
        fields = {
            "request_id": record.request_id,
            "group": self._group,
            "outcome": outcome,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": sum(record.num_tokens.values()),
            "seconds": round((time.time_ns() - record.arrived_at) / 1e9, 4),
            **record.cache_fields,
        }
        _log.info("submission ended", extra=fields)
        if record.parent is not None and outcome != "ok":
            now = time.time_ns()
            for choice in list(record.first_token_at):
                self._record_decode(record, choice, now, outcome)

    def _record_prefill(self, record: LoggedRequest, output: SequenceOutput, now: int) -> None:
        assert self._tracing is not None and record.parent is not None
        record.first_token_at[output.choice] = now
        started = now - int(output.prefill_seconds * 1e9)
        submitted = started - int(output.queued_seconds * 1e9)
        labels: dict[str, str | int] = {"group": self._group, "choice": output.choice}
        self._tracing.record_span("engine.queue", record.parent, submitted, started, **labels)
        prefill: dict[str, str | int | float] = {
            "prompt_tokens": record.prompt_tokens,
            **_cache_fields(output),
            **labels,
        }
        self._tracing.record_span("engine.prefill", record.parent, started, now, **prefill)

    def _record_decode(self, record: LoggedRequest, choice: int, now: int, finish: str) -> None:
        assert self._tracing is not None and record.parent is not None
        self._tracing.record_span(
            "engine.decode",
            record.parent,
            record.first_token_at.pop(choice, now),
            now,
            group=self._group,
            choice=choice,
            tokens=record.num_tokens.get(choice, 0),
            finish=finish,
        )


def _cache_fields(output: SequenceOutput) -> dict[str, str | int | float]:
    """Cached tokens of a prompt, and why the rest was not cached."""
    fields: dict[str, str | int | float] = {
        "cached_device_tokens": output.cached_device_tokens,
        "cached_host_tokens": max(output.cached_host_tokens, 0),
    }
    if output.miss is not None:
        fields |= {"prefix_miss": output.miss.reason.name.lower(), "prefix_miss_block": output.miss.index}
        if (evicted := output.miss.evicted) is not None:
            fields |= {
                "evicted_from": evicted.tier.name.lower(),
                "evicted_as": evicted.reason.name.lower(),
                "evicted_seconds_ago": round(output.miss.seconds_ago, 3),
            }
    return fields
