"""RequestLog: what a group logs and traces of each request, by the id that its router gave it.

    engine.queue ─ engine.prefill ─ engine.decode     for each choice, below the router's group.submit

It is called in the engine's thread, or in the service's before the engine knows the request. It does not know tokens'
meaning or streams.
"""

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
    """One request while it is answered. `firsts`: when each choice had its first token; both in nanoseconds."""

    request_id: str
    prompt_tokens: int
    parent: "Context | None"  # None: nobody traces
    arrived: int
    firsts: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    found: dict[str, str | int | float] = field(default_factory=dict)  # of its prompt in the cache, and why not all


class RequestLog:
    """`begin`, then `wrote` for each output, then `end`."""

    def __init__(self, group: str, tracing: Tracing | None = None) -> None:
        self._group = group
        self._tracing = tracing

    def begin(self, request_id: str, prompt_tokens: int, carrier: Mapping[str, str]) -> LoggedRequest:
        """A request has come."""
        traced = self._tracing is not None and carrier.get("traceparent")
        parent = self._tracing.parent(carrier) if self._tracing is not None and traced else None
        return LoggedRequest(request_id, prompt_tokens, parent, time.time_ns())

    def wrote(self, answer: LoggedRequest, output: SequenceOutput) -> None:
        """Tokens of it are on their way."""
        choice = output.choice
        if output.token_ids:
            answer.counts[choice] = answer.counts.get(choice, 0) + len(output.token_ids)
        if choice == 0 and output.cached_device_tokens >= 0:
            answer.found = _found(output)
        if answer.parent is None:
            return
        now = time.time_ns()
        if output.cached_device_tokens >= 0:
            self._record_prefill(answer, output, now)
        if output.finish_reason is not None:
            self._record_decode(answer, choice, now, output.finish_reason.name.lower())

    def end(self, answer: LoggedRequest, outcome: str) -> None:
        """Nothing more comes of it: "ok", "aborted", or "refused: ..."."""
        fields = {
            "request_id": answer.request_id,
            "group": self._group,
            "outcome": outcome,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": sum(answer.counts.values()),
            "seconds": round((time.time_ns() - answer.arrived) / 1e9, 4),
            **answer.found,
        }
        _log.info("answer ended", extra=fields)
        if answer.parent is not None and outcome != "ok":
            now = time.time_ns()
            for choice in list(answer.firsts):
                self._record_decode(answer, choice, now, outcome)

    def _record_prefill(self, answer: LoggedRequest, output: SequenceOutput, now: int) -> None:
        assert self._tracing is not None and answer.parent is not None
        answer.firsts[output.choice] = now
        began = now - int(output.prefill_seconds * 1e9)
        submitted = began - int(output.queued_seconds * 1e9)
        where: dict[str, str | int] = {"group": self._group, "choice": output.choice}
        self._tracing.record("engine.queue", answer.parent, submitted, began, **where)
        self._tracing.record(
            "engine.prefill",
            answer.parent,
            began,
            now,
            prompt_tokens=answer.prompt_tokens,
            **_found(output),
            **where,
        )

    def _record_decode(self, answer: LoggedRequest, choice: int, now: int, finish: str) -> None:
        assert self._tracing is not None and answer.parent is not None
        began = answer.firsts.pop(choice, now)
        self._tracing.record(
            "engine.decode",
            answer.parent,
            began,
            now,
            group=self._group,
            choice=choice,
            tokens=answer.counts.get(choice, 0),
            finish=finish,
        )


def _found(output: SequenceOutput) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "cached_device_tokens": output.cached_device_tokens,
        "cached_host_tokens": max(output.cached_host_tokens, 0),
    }
    if output.miss is not None:
        found |= {"prefix_miss": output.miss.reason.name.lower(), "prefix_miss_block": output.miss.index}
        if (evicted := output.miss.evicted) is not None:
            found |= {
                "evicted_from": evicted.tier.name.lower(),
                "evicted_as": evicted.reason.name.lower(),
                "evicted_seconds_ago": round(output.miss.seconds_ago, 3),
            }
    return found
