"""ChatResponse: makes chat completions, or the chunks of a stream, from GenerateService's events."""

from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, Usage
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import (
    FINISH_REASONS,
    ResponseHead,
    RunningUsage,
    count_scored,
    count_values,
    quote,
    stop_reason,
    usage_object,
)
from coatcheck.router.openai.sse import DONE, sse_event
from coatcheck.router.openai.tool_parser import ParsedToolCall, ToolParser

_CHUNK = "chat.completion.chunk"


class ChatResponse:
    """One per request: `make_chunk` and `make_end` for a stream, else `make_response`."""

    def __init__(
        self,
        head: ResponseHead,
        request: ChatRequest,
        formatter: LogprobsFormatter,
        make_parser: Callable[[], ToolParser] | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`make_parser`: makes the parser of each choice; None if no tool may be called."""
        self._head = head
        self._request = request
        self._formatter = formatter
        self._make_parser = make_parser
        self._prompt_token_ids = prompt_token_ids
        self._usage = Usage()
        self._parsers: dict[int, ToolParser] = {}
        self._started_choices: set[int] = set()
        usage = ',"usage":null' if request.include_usage else ""
        self._running_usage = RunningUsage() if request.has_running_usage else None
        # A plain chunk is _before, the choice's index, its text and _after.
        self._before = sse_event({**head.to_json(_CHUNK), "choices": []})[:-4] + b'{"index":'
        self._after = f'}},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()
        self._is_plain = not (request.logprobs or request.return_token_ids or make_parser or request.has_running_usage)

    def make_chunk(self, place: int, event: GenerateEvent) -> bytes:
        """The chunk for an event; empty for an event that clients do not see. `place` is 0, as a chat is one prompt."""
        kind = event.WhichOneof("event")
        if self._running_usage is not None:
            self._running_usage.count_event(event)
        if kind == "final":
            self._usage = event.final.usage
        if kind != "delta":
            return b""
        delta = event.delta
        if self._is_plain and not delta.finish_reason and delta.choice in self._started_choices:
            if not delta.text:
                return b""
            content = quote(delta.text).encode()
            return b'%b%d,"delta":{"content":%b%b' % (self._before, delta.choice, content, self._after)
        text, calls = self._parse_calls(delta)
        fields: dict[str, Any] = {}
        if delta.choice not in self._started_choices:
            self._started_choices.add(delta.choice)
            fields["role"] = "assistant"
        if text or (not calls and not delta.finish_reason):
            fields["content"] = text
        if calls:
            fields["tool_calls"] = [{"index": call.index, **call.to_json()} for call in calls]
        if fields == {"content": ""} and self._is_plain:
            return b""
        chunk = {**self._head.to_json(_CHUNK), "choices": [self._choice(delta, "delta", fields)]}
        if self._request.include_usage:
            chunk["usage"] = self._running_usage.to_json() if self._running_usage is not None else None
        return sse_event(chunk)

    def writer_for_large_chunk(self, place: int, event: GenerateEvent) -> None:
        """Always None: a chunk of a chat has a few tokens."""

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        """See WholeResponse."""
        scored = sum(count_scored(response.prompt_logprobs) for response in responses)
        return len(self._prompt_token_ids) + scored + sum(count_values(response.choices) for response in responses)

    def make_end(self) -> bytes:
        """The end of a stream: the usage, if the request asks for it, and "[DONE]"."""
        if not self._request.include_usage:
            return DONE
        return sse_event({**self._head.to_json(_CHUNK), "choices": [], "usage": usage_object([self._usage])}) + DONE

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The chat completion object."""
        (response,) = responses
        choices = []
        for delta in response.choices:
            text, calls = self._parse_calls(delta)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text or None
                message["tool_calls"] = [call.to_json() for call in calls]
            choices.append(self._choice(delta, "message", message))
        completion = {**self._head.to_json("chat.completion"), "choices": choices}
        completion["usage"] = usage_object([response.final.usage])
        if self._request.prompt_logprobs is not None:
            completion["prompt_logprobs"] = self._formatter.prompt_logprobs(response.prompt_logprobs.tokens)
        if self._request.return_token_ids:
            completion["prompt_token_ids"] = list(self._prompt_token_ids)
        return completion

    def _parse_calls(self, delta: Delta) -> tuple[str, list[ParsedToolCall]]:
        """(text outside of tool calls, tool calls that the delta completes)."""
        if self._make_parser is None:
            return delta.text, []
        parser = self._parsers.get(delta.choice)
        if parser is None:
            parser = self._parsers[delta.choice] = self._make_parser()
        text, calls = parser.feed(delta.text)
        if delta.finish_reason:
            rest, more = parser.finish()
            return text + rest, calls + more
        return text, calls

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        reason = FINISH_REASONS[delta.finish_reason]
        parser = self._parsers.get(delta.choice)
        if reason == "stop" and parser is not None and parser.has_complete_calls and self._request.tool_mode != "named":
            reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": delta.choice,
            name: message,
            "logprobs": self._formatter.chat_logprobs(delta.logprobs) if self._request.logprobs else None,
            "finish_reason": reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = stop_reason(delta)
        if self._request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice
