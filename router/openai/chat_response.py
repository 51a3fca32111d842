"""ChatResponse: makes chat completions, or the chunks of a stream, from GenerateService's events."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateResponse, TokenLogprob
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.logprobs_chunk import ChoiceLogprobs
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import (
    FINISH_REASONS,
    EchoedPrompt,
    OpenAIResponse,
    ResponseHead,
    stop_reason,
    with_logprobs,
)
from coatcheck.router.openai.response_sender import LargeChunk
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan, ReasoningCounter
from coatcheck.router.parsing.parts import Content, Part, Reasoning, ToolCallDelta
from coatcheck.router.serving.logprob_limits import count_values


@dataclass(slots=True)
class _OpenChoice:
    """A choice that is streamed. `logprobs` and `token_ids`: of tokens whose text the parser holds back."""

    parser: OutputParser
    counter: ReasoningCounter | None
    has_started: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


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
        plan: ParsingPlan,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`plan`: how the choices are parsed."""
        prompt = EchoedPrompt(token_ids=prompt_token_ids)
        super().__init__(head, request, formatter, [prompt], is_plain=not request.logprobs)
        self._request = request
        self._plan = plan
        self._open: dict[int, _OpenChoice] = {}
        self._counters: list[ReasoningCounter] = []  # of the choices that have begun

    def make_delta_chunk(self, prompt_index: int, delta: Delta) -> bytes | LargeChunk:
        choice = self._open.get(delta.choice)
        if choice is None:
            choice = self._open[delta.choice] = self._open_choice()
        if choice.counter is not None:
            choice.counter.feed(delta.token_ids)
        if self._is_plain and self._plan.is_plain and choice.has_started and not delta.finish_reason:
            return self._make_plain_chunk(delta.choice, delta.text) if delta.text else b""
        parts = choice.parser.feed_delta(delta.text, is_last=bool(delta.finish_reason))
        is_middle = choice.has_started and not delta.finish_reason
        if self._is_plain and is_middle and len(parts) <= 1:
            if not parts:
                return b""
            if isinstance(parts[0], Content):
                return self._make_plain_chunk(delta.choice, parts[0].text)
        choice.logprobs += delta.logprobs
        choice.token_ids += delta.token_ids
        if not parts and is_middle and not (self._request.return_token_ids or self._running_usage is not None):
            return b""
        fields = _delta_fields(parts)
        if not choice.has_started:
            choice.has_started = True
            if echoed := self._request.echoed:
                fields["content"] = echoed + fields.get("content", "")
            fields = {"role": "assistant", **(fields or {"content": ""})}
        made = self._choice(delta, "delta", fields, choice)
        choice.logprobs, choice.token_ids = [], []
        return self._make_chunk(made)

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        completion = super().make_response(responses)
        prompt = self._prompts[0]
        completion["prompt_logprobs"] = None
        if self._request.prompt_logprobs is not None:
            completion["prompt_logprobs"] = self._formatter.prompt_logprobs(prompt.logprobs.tokens)
        if self._request.return_token_ids:
            completion["prompt_token_ids"] = list(prompt.token_ids)
        return completion

    def make_choice(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        choice = self._open_choice()
        if choice.counter is not None:
            choice.counter.feed(delta.token_ids)
        parts = choice.parser.feed_delta(delta.text, is_last=True)
        calls = join_calls(parts)
        text = self._request.echoed + "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (calls or reasoning) else None,
            "refusal": None,
            "reasoning_content": reasoning or None,
            "reasoning": reasoning or None,
        }
        if calls:
            message["tool_calls"] = [_call_fields(call) for call in calls]
        choice.logprobs, choice.token_ids = list(delta.logprobs), list(delta.token_ids)
        return with_logprobs(self._choice(delta, "message", message, choice))

    def _open_choice(self) -> _OpenChoice:
        parser, counter = OutputParser(self._plan), None
        if self._plan.output_format.has_reasoning:
            skips_special = self._request.skip_special_tokens and not self._plan.keeps_special_tokens
            counter = ReasoningCounter(parser, self._formatter.offsets(skips_special, 0))
            self._counters.append(counter)
        return _OpenChoice(parser, counter)

    def _usage(self) -> dict[str, Any]:
        reasoning = sum(counter.count() for counter in self._counters)
        return {**super()._usage(), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _choice(self, delta: Delta, name: str, message: dict[str, Any], choice: _OpenChoice) -> dict[str, Any]:
        reason = FINISH_REASONS[delta.finish_reason]
        if reason == "stop" and choice.parser.has_complete_calls and self._plan.tool_mode != "named":
            reason = "tool_calls"
        logprobs = None
        if self._request.logprobs:
            logprobs = ChoiceLogprobs(self._formatter, choice.logprobs, None, count_values(choice.logprobs))
        made: dict[str, Any] = {
            "index": delta.choice,
            name: message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if delta.finish_reason:
            made["stop_reason"] = stop_reason(delta)
        if self._request.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made


def join_calls(parts: Sequence[Part]) -> list[ToolCallDelta]:
    """The tool calls among `parts`, each whole."""
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            call = calls.get(part.index)
            calls[part.index] = replace(call, arguments=call.arguments + part.arguments) if call else part
    return list(calls.values())


def _call_fields(call: ToolCallDelta) -> dict[str, Any]:
    """A whole call in a message."""
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a chunk's `delta`."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                fields["reasoning_content"] = fields["reasoning"] = fields.get("reasoning", "") + text
            case ToolCallDelta(index, arguments, name, call_id, is_custom):
                kind, field_name = ("custom", "input") if is_custom else ("function", "arguments")
                made = calls.setdefault(index, {"index": index, kind: {field_name: ""}})
                made[kind][field_name] += arguments
                if name:
                    made |= {"id": call_id, "type": kind, kind: {"name": name, **made[kind]}}
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields
