"""OpenAIResponse: what the responses of chat completions and text completions have in common."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Delta,
    GenerateEvent,
    GenerateResponse,
    PromptLogprobs,
    Timings,
    Usage,
)
from coatcheck.proto.stubs.coatcheck_pb2 import Final as FinalEvent
from coatcheck.router.http.errors import openai_error, report_error
from coatcheck.router.http.json_response import LARGE_VALUES
from coatcheck.router.openai.logprobs_chunk import ChoiceLogprobs, LogprobsChunk
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_sender import LargeChunk
from coatcheck.router.openai.sampling_fields import SamplingFields
from coatcheck.router.serving.logprob_limits import count_values

DONE: Final = b"data: [DONE]\n\n"
FINISH_REASONS: Final[dict[int, str | None]] = {0: None, FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}
_CHARACTERS_PER_VALUE: Final = 64
_quote = json.encoder.encode_basestring_ascii  # json.dumps of a string, without its overhead


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The first fields of a response and of each of its chunks. `shows_metrics`: the response has its own timings."""

    id: str
    model: str
    fingerprint: str
    shows_metrics: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, kind: str) -> dict[str, Any]:
        """`kind`: the `object` field."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class EchoedPrompt:
    """What a response shows of a prompt. `echo`: the prompt's text if the request asks for it. `token_ids`: its tokens
    if the response needs them. `is_text`: the client sent a text. `logprobs`: those of the tokens after the first."""

    echo: str = ""
    token_ids: Sequence[int] = ()
    is_text: bool = False
    logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)

    def count_values(self, logprobs: PromptLogprobs) -> int:
        """About how many JSON values show the prompt in one choice, with these `logprobs`."""
        return len(self.token_ids) + count_values(logprobs.tokens) + count_text(self.echo)


class OpenAIResponse(ABC):
    """One per request: `make_chunk` and `make_end` for a stream, else `make_response`. It can be pickled before its
    first method is called."""

    kind: ClassVar[str]  # the field `object` of a response
    chunk_kind: ClassVar[str]  # the field `object` of a chunk
    # The JSON of a plain chunk's choice between the choice's index and its text, and after the text.
    plain_choice: ClassVar[tuple[bytes, bytes]]

    def __init__(
        self,
        head: ResponseHead,
        request: SamplingFields,
        formatter: LogprobsFormatter,
        prompts: Sequence[EchoedPrompt],
        *,
        is_plain: bool,
    ) -> None:
        """`is_plain`: the request asks for text only, so a chunk in the middle of a stream is made of a template."""
        self._head = head
        self._formatter = formatter
        self._prompts = dict(enumerate(prompts))
        self._usages: list[Usage] = []
        self._timings: list[Timings] = []
        self._is_one_choice = request.n == 1 and len(prompts) == 1
        self._include_usage = request.include_usage
        self._running_usage = Usage() if request.has_running_usage else None  # of a stream so far
        self._is_plain = is_plain and not (request.return_token_ids or request.has_running_usage)
        opening, closing = self.plain_choice
        usage = b',"usage":null' if request.include_usage else b""
        # A plain chunk is _before, the choice's index, _between, its text and _after.
        self._before = sse_event({**head.to_json(self.chunk_kind), "choices": []})[:-4] + b'{"index":'
        self._between = opening
        self._after = closing + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def make_chunk(self, prompt_index: int, event: GenerateEvent) -> bytes | LargeChunk:
        """The chunk for an event of prompt number `prompt_index`; empty for an event that clients do not see. A chunk
        of many values is returned as a LargeChunk."""
        if self._running_usage is not None:
            self._count_event(event)
        kind = event.WhichOneof("event")
        if kind == "delta":
            return self.make_delta_chunk(prompt_index, event.delta)
        if kind == "prompt_logprobs":
            self._prompts[prompt_index].logprobs.MergeFrom(event.prompt_logprobs)
        elif kind == "final":
            self._add_final(event.final)
        return b""

    @abstractmethod
    def make_delta_chunk(self, prompt_index: int, delta: Delta) -> bytes | LargeChunk:
        """As make_chunk, for a delta that the running usage includes already."""

    def make_end(self) -> bytes:
        """The end of a stream: the usage, if the request asks for it, and "[DONE]"."""
        if not self._include_usage:
            return DONE
        chunk = {**self._head.to_json(self.chunk_kind), "choices": [], "usage": self._usage(), **self._metrics()}
        return sse_event(chunk) + DONE

    def make_error(self, error: Exception) -> bytes:
        """The end of a stream that fails: the status is sent already, so the error is the last event."""
        return sse_event(openai_error(report_error(error))) + DONE

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The response object. `responses`: one for each prompt."""
        choices = []
        for prompt_index, response in enumerate(responses):
            self._prompts[prompt_index].logprobs = response.prompt_logprobs
            self._add_final(response.final)
            choices += [self.make_choice(prompt_index, delta) for delta in response.choices]
        return {**self._head.to_json(self.kind), "choices": choices, "usage": self._usage(), **self._metrics()}

    @abstractmethod
    def make_choice(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        """A choice of the response object, from its only delta."""

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        """About how many JSON values the response object has."""
        count = 0
        for prompt_index, response in enumerate(responses):
            count += len(response.choices) * self._prompts[prompt_index].count_values(response.prompt_logprobs)
            count += sum(map(_count_delta, response.choices))
        return count

    def _make_plain_chunk(self, index: int, text: str) -> bytes:
        return b"%b%d%b%b%b" % (self._before, index, self._between, _quote(text).encode(), self._after)

    def _make_chunk(self, choice: dict[str, Any]) -> bytes | LargeChunk:
        """The chunk of a choice whose `logprobs` are ChoiceLogprobs or None; a LargeChunk if they have many values."""
        logprobs: ChoiceLogprobs | None = choice["logprobs"]
        if logprobs is None or logprobs.num_values <= LARGE_VALUES:
            return self._write_chunk(choice)
        return LogprobsChunk.split(self._write_chunk({**choice, "logprobs": None}), logprobs)

    def _write_chunk(self, choice: dict[str, Any]) -> bytes:
        choice = with_logprobs(choice)
        chunk = {**self._head.to_json(self.chunk_kind), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = _token_counts([self._running_usage]) if self._running_usage is not None else None
        return sse_event(chunk)

    def _count_event(self, event: GenerateEvent) -> None:
        assert self._running_usage is not None
        self._running_usage.prompt_tokens += event.started.prompt_tokens
        self._running_usage.completion_tokens += len(event.delta.token_ids)

    def _add_final(self, final: FinalEvent) -> None:
        self._usages.append(final.usage)
        self._timings.append(final.timings)

    def _metrics(self) -> dict[str, Any]:
        """The field `metrics` if the server shows it. It is null for several choices."""
        if not self._head.shows_metrics:
            return {}
        if not self._is_one_choice or not self._timings:
            return {"metrics": None}
        return {"metrics": timing_metrics(self._timings[0], self._usages[0])}

    def _usage(self) -> dict[str, Any]:
        """The `usage` of the response, summed over its prompts."""
        cached = sum(usage.cached_device_tokens + usage.cached_host_tokens for usage in self._usages)
        return {**_token_counts(self._usages), "prompt_tokens_details": {"cached_tokens": cached}}


def timing_metrics(timings: Timings, usage: Usage) -> dict[str, float | None]:
    """The field `metrics` of a response with one choice, in vLLM's form."""
    tokens, first, rest = usage.completion_tokens, timings.first_token_seconds, timings.generation_seconds
    metrics = {
        "time_to_first_token_ms": first * 1000,
        "generation_time_ms": rest * 1000,
        "queue_time_ms": timings.queue_seconds * 1000,
        "mean_itl_ms": rest * 1000 / (tokens - 1) if tokens > 1 else None,
        "tokens_per_second": tokens / (first + rest) if first + rest else None,
    }
    return {name: value and round(value, 3) for name, value in metrics.items()}


def _token_counts(usages: Sequence[Usage]) -> dict[str, int]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def with_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice with its ChoiceLogprobs as JSON, if it has any."""
    logprobs: ChoiceLogprobs | None = choice["logprobs"]
    return choice if logprobs is None else {**choice, "logprobs": logprobs.to_json()}


def sse_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def count_text(text: str) -> int:
    """The number of short JSON values that take as long to encode as `text`."""
    return len(text) // _CHARACTERS_PER_VALUE


def count_fields(value: object) -> int:
    """The number of short JSON values that take as long to encode as a JSON value."""
    count, rest = 0, [value]
    while rest:
        one = rest.pop()
        count += 1
        if isinstance(one, str):
            count += count_text(one)
        elif isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return count


def _count_delta(delta: Delta) -> int:
    return len(delta.token_ids) + count_values(delta.logprobs) + count_text(delta.text)


def stop_reason(delta: Delta) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or stop token that ended a choice."""
    stopped_by = delta.WhichOneof("stopped_by")
    return getattr(delta, stopped_by) if stopped_by else None
