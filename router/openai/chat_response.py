"""ChatResponse: makes chat completions, or the chunks of a stream, from GenerateService's events."""

from collections.abc import Sequence
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateResponse
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import (
    FINISH_REASONS,
    EchoedPrompt,
    OpenAIResponse,
    ResponseHead,
    stop_reason,
)
from coatcheck.router.openai.tool_parser import ParsedToolCall, ToolCallFormat, ToolParser


class ChatResponse(OpenAIResponse):
    """`prompt_index` is always 0: a chat is one prompt."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    plain_choice = (b',"delta":{"content":', b"}")

    def __init__(
        self,
        head: ResponseHead,
        request: ChatRequest,
        formatter: LogprobsFormatter,
        call_format: ToolCallFormat,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`call_format`: how the model writes tool calls that no grammar constrains."""
        may_call = request.tool_mode != "none"
        prompt = EchoedPrompt(token_ids=prompt_token_ids)
        super().__init__(head, request, formatter, [prompt], is_plain=not (request.logprobs or may_call))
        self._request = request
        self._call_format = call_format
        self._may_call = may_call
        self._parsers: dict[int, ToolParser] = {}
        self._started_choices: set[int] = set()

    def make_delta_chunk(self, prompt_index: int, delta: Delta) -> bytes:
        if self._is_plain and not delta.finish_reason and delta.choice in self._started_choices:
            return self._make_plain_chunk(delta.choice, delta.text) if delta.text else b""
        text, calls = self._parse_calls(delta)
        fields: dict[str, Any] = {}
        if delta.choice not in self._started_choices:
            self._started_choices.add(delta.choice)
            fields["role"] = "assistant"
        if text or (not calls and not delta.finish_reason):
            fields["content"] = text
        if calls:
            fields["tool_calls"] = [{"index": call.index, **call.to_json()} for call in calls]
        return self._make_chunk(self._choice(delta, "delta", fields))

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        completion = super().make_response(responses)
        prompt = self._prompts[0]
        if self._request.prompt_logprobs is not None:
            completion["prompt_logprobs"] = self._formatter.prompt_logprobs(prompt.logprobs.tokens)
        if self._request.return_token_ids:
            completion["prompt_token_ids"] = list(prompt.token_ids)
        return completion

    def make_choice(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        text, calls = self._parse_calls(delta)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [call.to_json() for call in calls]
        return self._choice(delta, "message", message)

    def _parse_calls(self, delta: Delta) -> tuple[str, list[ParsedToolCall]]:
        """(text outside of tool calls, tool calls that the delta completes)."""
        if not self._may_call:
            return delta.text, []
        parser = self._parsers.get(delta.choice)
        if parser is None:
            request = self._request
            mode = request.tool_mode
            parser = self._parsers[delta.choice] = ToolParser(
                mode if mode in ("named", "required") else self._call_format,
                name=request.named_function,
                max_calls=None if request.parallel_tool_calls else 1,
            )
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
