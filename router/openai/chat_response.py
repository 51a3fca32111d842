"""ChatResponse: the core's events as chat completions, whole or chunk by chunk."""

from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, Usage
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.logprobs_format import TokenText
from coatcheck.router.openai.response_parts import (
    DONE,
    REASONS,
    ResponseHead,
    RunningUsage,
    count_scored,
    count_values,
    quote,
    server_sent,
    stop_reason,
    usage_json,
)
from coatcheck.router.openai.tool_parser import Call, ToolParser

_CHUNK = "chat.completion.chunk"


class ChatResponse:
    """Made per request; `chunk` and `end` for a stream, `whole` otherwise. `tool_calls` makes a choice's parser."""

    def __init__(
        self,
        head: ResponseHead,
        request: ChatRequest,
        tokens: TokenText,
        tool_calls: Callable[[], ToolParser] | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._head = head
        self._request = request
        self._tokens = tokens
        self._tool_calls = tool_calls
        self._prompt_token_ids = prompt_token_ids
        self._usage = Usage()
        self._calls: dict[int, ToolParser] = {}
        self._begun: set[int] = set()
        usage = ',"usage":null' if request.include_usage else ""
        self._running = RunningUsage() if request.counts_on else None
        # A chunk is these, with the choice's number and its text between them.
        self._before = server_sent({**head.to_json(_CHUNK), "choices": []})[:-4] + b'{"index":'
        self._after = f'}},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()
        self._is_plain = not (request.logprobs or request.return_token_ids or tool_calls or request.counts_on)

    def chunk(self, place: int, event: GenerateEvent) -> bytes:
        """What a stream says of an event; nothing where that is nothing."""
        kind = event.WhichOneof("event")
        if self._running is not None:
            self._running.see(event)
        if kind == "final":
            self._usage = event.final.usage
        if kind != "delta":
            return b""
        delta = event.delta
        if self._is_plain and not delta.finish_reason and delta.choice in self._begun:
            if not delta.text:
                return b""
            content = quote(delta.text).encode()
            return b'%b%d,"delta":{"content":%b%b' % (self._before, delta.choice, content, self._after)
        text, calls = self._read(delta)
        said: dict[str, Any] = {}
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said["role"] = "assistant"
        if text or (not calls and not delta.finish_reason):
            said["content"] = text
        if calls:
            said["tool_calls"] = [{"index": call.index, **call.to_json()} for call in calls]
        if said == {"content": ""} and self._is_plain:
            return b""
        chunk = {**self._head.to_json(_CHUNK), "choices": [self._choice(delta, "delta", said)]}
        if self._request.include_usage:
            chunk["usage"] = self._running.to_json() if self._running is not None else None
        return server_sent(chunk)

    def writer_of_large(self, place: int, event: GenerateEvent) -> None:
        """See large_answer.Streamed. None: a chat's chunk has a few tokens."""

    def values(self, responses: Sequence[GenerateResponse]) -> int:
        """See large_answer.Whole."""
        scored = sum(count_scored(response.prompt_logprobs) for response in responses)
        return len(self._prompt_token_ids) + scored + sum(count_values(response.choices) for response in responses)

    def end(self) -> bytes:
        """The last words of a stream."""
        if not self._request.include_usage:
            return DONE
        return server_sent({**self._head.to_json(_CHUNK), "choices": [], "usage": usage_json([self._usage])}) + DONE

    def whole(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The one object of an answer that does not stream."""
        (response,) = responses
        choices = []
        for delta in response.choices:
            text, calls = self._read(delta)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text or None
                message["tool_calls"] = [call.to_json() for call in calls]
            choices.append(self._choice(delta, "message", message))
        made = {**self._head.to_json("chat.completion"), "choices": choices}
        made["usage"] = usage_json([response.final.usage])
        if self._request.prompt_logprobs is not None:
            made["prompt_logprobs"] = self._tokens.prompt(response.prompt_logprobs.tokens)
        if self._request.return_token_ids:
            made["prompt_token_ids"] = list(self._prompt_token_ids)
        return made

    def _read(self, delta: Delta) -> tuple[str, list[Call]]:
        """The delta's text without the calls in it, and those."""
        if self._tool_calls is None:
            return delta.text, []
        parser = self._calls.get(delta.choice)
        if parser is None:
            parser = self._calls[delta.choice] = self._tool_calls()
        text, calls = parser.feed(delta.text)
        if delta.finish_reason:
            rest, more = parser.end()
            return text + rest, calls + more
        return text, calls

    def _choice(self, delta: Delta, name: str, said: dict[str, Any]) -> dict[str, Any]:
        reason = REASONS[delta.finish_reason]
        parser = self._calls.get(delta.choice)
        if reason == "stop" and parser is not None and parser.found and self._request.called != "named":
            reason = "tool_calls"
        made: dict[str, Any] = {
            "index": delta.choice,
            name: said,
            "logprobs": self._tokens.chat(delta.logprobs) if self._request.logprobs else None,
            "finish_reason": reason,
        }
        if delta.finish_reason:
            made["stop_reason"] = stop_reason(delta)
        if self._request.return_token_ids:
            made["token_ids"] = list(delta.token_ids)
        return made
