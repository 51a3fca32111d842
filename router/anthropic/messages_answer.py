"""MessagesAnswer: makes Anthropic's messages, or the events of a stream, from GenerateService's events."""

import json
from collections.abc import Sequence
from typing import Any, Final

from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    Delta,
    GenerateEvent,
    GenerateResponse,
    Usage,
)
from coatcheck.router.http.errors import anthropic_error, report_error
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import count_text
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan, ReasoningCounter
from coatcheck.router.parsing.parts import Content, Part, Reasoning, ToolCallDelta

_DELTAS: Final = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class MessagesAnswer:
    """The ResponseRenderer of one message, which has one choice."""

    def __init__(self, message_id: str, model: str, plan: ParsingPlan, formatter: LogprobsFormatter) -> None:
        """`formatter`: knows where in the text each token begins."""
        self._id = message_id
        self._model = model
        self._plan = plan
        self._formatter = formatter
        self._parser = OutputParser(plan)
        self._counter: ReasoningCounter | None = None  # made with the first delta: it cannot be pickled
        self._last_delta = Delta()
        self._usage = Usage()
        # Of a stream: the number of blocks that have ended, and the kind of the open one: "thinking", "text", or the
        # index of a tool call.
        self._blocks = 0
        self._open: str | int | None = None

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        (response,) = responses
        (self._last_delta,) = response.choices
        parts = self._parse(self._last_delta, is_last=True)
        content: list[dict[str, Any]] = []
        calls = {call.index: call for call in join_calls(parts)}
        for part in parts:
            if isinstance(part, ToolCallDelta):
                if part.name:
                    call = calls[part.index]
                    content.append({**_start_of(call), "input": _parse_input(call.arguments)})
            else:
                kind = "thinking" if isinstance(part, Reasoning) else "text"
                block = _start_of(part)
                block[kind] = part.text
                content.append(block)
        return self._message(content, self._usage_fields(response.final.usage)) | self._stop_fields()

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        return sum(count_text(choice.text) for response in responses for choice in response.choices)

    def make_chunk(self, prompt_index: int, event: GenerateEvent) -> bytes:
        match event.WhichOneof("event"):
            case "started":
                usage = self._usage_fields(Usage(prompt_tokens=event.started.prompt_tokens))
                message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
                return _event("message_start", message=message) + _event("ping")
            case "delta":
                parts = self._parse(event.delta, is_last=bool(event.delta.finish_reason))
                self._last_delta = event.delta
                return b"".join(map(self._part_events, parts))
            case "final":
                self._usage = event.final.usage
        return b""

    def make_end(self) -> bytes:
        return (
            self._close_block()
            + _event("message_delta", delta=self._stop_fields(), usage=self._usage_fields(self._usage))
            + _event("message_stop")
        )

    def make_error(self, error: Exception) -> bytes:
        return _event("error", **anthropic_error(report_error(error)))

    def _parse(self, delta: Delta, *, is_last: bool) -> list[Part]:
        if self._plan.output_format.has_reasoning:
            if self._counter is None:
                skips_special = not self._plan.keeps_special_tokens
                self._counter = ReasoningCounter(self._parser, self._formatter.offsets(skips_special, 0))
            self._counter.feed(delta.token_ids)
        return self._parser.feed_delta(delta.text, is_last=is_last)

    def _part_events(self, part: Part) -> bytes:
        """The events of a part. A part of another kind ends the open block and begins the next one."""
        if isinstance(part, ToolCallDelta):
            kind: str | int = part.index
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            is_empty = not part.arguments
        else:
            kind = "thinking" if isinstance(part, Reasoning) else "text"
            name, field = _DELTAS[kind]
            delta = {"type": name, field: part.text}
            is_empty = False
        begun = b""
        if kind != self._open:
            begun = self._close_block() + _event(
                "content_block_start", index=self._blocks, content_block=_start_of(part)
            )
            self._open = kind
        return begun if is_empty else begun + _event("content_block_delta", index=self._blocks, delta=delta)

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _stop_fields(self) -> dict[str, Any]:
        """The fields that tell why the message ended."""
        end, stop = self._last_delta, None
        if end.finish_reason == FINISH_REASON_LENGTH:
            reason = "max_tokens"
        elif self._parser.has_complete_calls:
            reason = "tool_use"
        elif end.HasField("stop"):
            reason, stop = "stop_sequence", end.stop
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage_fields(self, usage: Usage) -> dict[str, Any]:
        """Anthropic's `usage`. Its input_tokens do not include the cached ones."""
        cached = usage.cached_device_tokens + usage.cached_host_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._counter.count() if self._counter is not None else 0},
        }

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "usage": usage,
        }  # fmt: skip


def _start_of(part: Part) -> dict[str, Any]:
    """A content block without its text or input."""
    match part:
        case ToolCallDelta():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Content():
            return {"type": "text", "text": ""}


def _parse_input(arguments: str) -> Any:
    """The arguments of a call as an object. {} if they are not a JSON object, as when max_tokens has cut them."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # raises for NaN and infinity, which json.loads takes
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    body = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()
