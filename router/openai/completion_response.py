"""CompletionResponse: makes text completions, or the chunks of a stream, from GenerateService's events."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import (
    Delta,
    GenerateEvent,
    GenerateResponse,
    PromptLogprobs,
    TokenLogprob,
    Usage,
)
from coatcheck.router.http.json_response import LARGE_VALUES
from coatcheck.router.openai.completion_request import CompletionRequest
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.response_parts import (
    FINISH_REASONS,
    ResponseHead,
    RunningUsage,
    count_scored,
    count_text,
    count_values,
    quote,
    stop_reason,
    usage_object,
)
from coatcheck.router.openai.sse import DONE, sse_event
from coatcheck.router.text.text_offsets import TextOffsets


@dataclass(slots=True)
class EchoedPrompt:
    """What a response shows of a prompt. `echo`: the prompt's text if the request asks for it. `token_ids`: its tokens
    if the response needs them. `is_text`: the client sent a text. `logprobs`: of the tokens after the first."""

    echo: str = ""
    token_ids: Sequence[int] = ()
    is_text: bool = False
    logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)


class CompletionResponse:
    """One per request: `make_chunk` and `make_end` for a stream, else `make_response`."""

    def __init__(
        self,
        head: ResponseHead,
        request: CompletionRequest,
        prompts: Sequence[EchoedPrompt],
        formatter: LogprobsFormatter,
    ) -> None:
        self._head = head
        self._request = request
        self._prompts = dict(enumerate(prompts))
        self._formatter = formatter
        self._usages: list[Usage] = []
        # By the index of a choice that has begun: its characters so far, and the offsets of its next tokens.
        self._lengths: dict[int, int] = {}
        self._offsets: dict[int, TextOffsets] = {}
        usage = ',"usage":null' if request.include_usage else ""
        self._running_usage = RunningUsage() if request.has_running_usage else None
        # A plain chunk is _before, the choice's index, its text and _after.
        self._before = sse_event({**head.to_json("text_completion"), "choices": []})[:-4] + b'{"index":'
        self._after = f',"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()
        shows_tokens = request.logprobs is not None or request.return_token_ids
        self._is_plain = not (shows_tokens or request.echo or request.has_running_usage)

    def make_chunk(self, place: int, event: GenerateEvent) -> bytes:
        """The chunk for an event of the prompt with index `place`; empty for an event that clients do not see."""
        kind = event.WhichOneof("event")
        if self._running_usage is not None:
            self._running_usage.count_event(event)
        if kind == "prompt_logprobs":
            self._prompts[place].logprobs.MergeFrom(event.prompt_logprobs)
        elif kind == "final":
            self._usages.append(event.final.usage)
        elif kind == "delta":
            return self.make_delta_chunk(place, event.delta)
        return b""

    def make_delta_chunk(self, place: int, delta: Delta) -> bytes:
        """As make_chunk, for a delta that the running usage includes already."""
        if self._is_plain and not delta.finish_reason:
            if not delta.text:
                return b""
            index = place * self._request.n + delta.choice
            return b'%b%d,"text":%b%b' % (self._before, index, quote(delta.text).encode(), self._after)
        chunk = {**self._head.to_json("text_completion"), "choices": [self._choice(place, delta)]}
        if self._request.include_usage:
            chunk["usage"] = self._running_usage.to_json() if self._running_usage is not None else None
        return sse_event(chunk)

    def writer_for_large_chunk(self, place: int, event: GenerateEvent) -> "CompletionResponse | None":
        """See StreamedResponse. The first chunk of each choice may be large, because it shows the prompt."""
        delta = event.delta
        if not event.HasField("delta") or place * self._request.n + delta.choice in self._lengths:
            return None
        if self._count_prompt_values(self._prompts[place], self._prompts[place].logprobs) <= LARGE_VALUES:
            return None
        if self._running_usage is not None:
            self._running_usage.count_event(event)
        writer = copy(self)
        writer._prompts, writer._offsets, writer._lengths = {place: self._prompts[place]}, {}, {}
        index, offsets = self._begin_choice(place, delta)
        if delta.logprobs:
            offsets.next_offsets([score.token_id for score in delta.logprobs])
        echo = self._prompts[place].echo if self._request.echo else ""
        self._lengths[index] = len(echo) + (0 if self._request.scores_only else len(delta.text))
        return writer

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        """See WholeResponse."""
        prompts = sum(
            self._count_prompt_values(self._prompts[place], response.prompt_logprobs)
            for place, response in enumerate(responses)
        )
        return self._request.n * prompts + sum(count_values(response.choices) for response in responses)

    def _count_prompt_values(self, prompt: EchoedPrompt, logprobs: PromptLogprobs) -> int:
        """About how many JSON values show the prompt in one choice."""
        return len(prompt.token_ids) + count_scored(logprobs) + count_text(prompt.echo)

    def make_end(self) -> bytes:
        """The end of a stream: the usage, if the request asks for it, and "[DONE]"."""
        if not self._request.include_usage:
            return DONE
        usage = usage_object(self._usages, self._request.scores_only)
        return sse_event({**self._head.to_json("text_completion"), "choices": [], "usage": usage}) + DONE

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The text completion object."""
        choices = []
        for place, response in enumerate(responses):
            self._prompts[place].logprobs = response.prompt_logprobs
            for delta in response.choices:
                choice = self._choice(place, delta)
                if self._request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._formatter.prompt_logprobs(response.prompt_logprobs.tokens)
                choices.append(choice)
        usage = usage_object((response.final.usage for response in responses), self._request.scores_only)
        return {**self._head.to_json("text_completion"), "choices": choices, "usage": usage}

    def _begin_choice(self, place: int, delta: Delta) -> tuple[int, TextOffsets]:
        """(index of a choice that begins now, offsets of its generated tokens)."""
        index = place * self._request.n + delta.choice
        start = len(self._prompts[place].echo) if self._request.echo else 0
        self._offsets[index] = self._formatter.offsets(self._request.skip_special_tokens, start)
        return index, self._offsets[index]

    def _choice(self, place: int, delta: Delta) -> dict[str, Any]:
        request, prompt = self._request, self._prompts[place]
        index = place * request.n + delta.choice
        is_first = index not in self._lengths
        if is_first:
            self._begin_choice(place, delta)
        text = "" if request.scores_only else delta.text
        logprobs: Iterable[TokenLogprob | int] = () if request.scores_only else delta.logprobs
        token_ids = [] if request.scores_only else list(delta.token_ids)
        offsets = (
            []
            if request.scores_only
            else self._offsets[index].next_offsets([score.token_id for score in delta.logprobs])
        )
        if is_first and request.echo:
            text = prompt.echo + text
            # Not a list: protobuf hashes the address of each message, 26 to 57 s for a million.
            logprobs = chain(prompt.token_ids[:1], prompt.logprobs.tokens, logprobs)
            if request.logprobs is not None:
                sent = prompt.echo if prompt.is_text else None
                offsets = [*self._formatter.prompt_offsets(prompt.token_ids, sent), *offsets]
        length = self._lengths[index] = self._lengths.get(index, 0) + len(text)
        if delta.finish_reason:  # a stop string may have cut the text before its last tokens
            offsets = [min(offset, length) for offset in offsets]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if request.scores_only else FINISH_REASONS[delta.finish_reason],
            "stop_reason": stop_reason(delta),
        }
        if request.logprobs is not None:
            choice["logprobs"] = self._formatter.completion_logprobs(logprobs, offsets)
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice
