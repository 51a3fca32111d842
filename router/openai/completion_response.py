"""CompletionResponse: the core's events as text completions, whole or chunk by chunk."""

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
from coatcheck.router.openai.logprobs_format import TokenText
from coatcheck.router.openai.response_parts import (
    DONE,
    REASONS,
    ResponseHead,
    RunningUsage,
    count_scored,
    count_text,
    count_values,
    quote,
    server_sent,
    stop_reason,
    usage_json,
)
from coatcheck.router.text.text_offsets import TextOffsets


@dataclass(slots=True)
class ShownPrompt:
    """One prompt of a request. `echo` is its text where that is to be repeated, `token_ids` where they are known.
    `is_text`: it was sent as a text. `logprobs` are those of its tokens after the first."""

    echo: str = ""
    token_ids: Sequence[int] = ()
    is_text: bool = False
    logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)


class CompletionResponse:
    """Made per request; `chunk` and `end` for a stream, `whole` otherwise."""

    def __init__(
        self, head: ResponseHead, request: CompletionRequest, prompts: Sequence[ShownPrompt], tokens: TokenText
    ) -> None:
        self._head = head
        self._request = request
        self._prompts = dict(enumerate(prompts))
        self._tokens = tokens
        self._usages: list[Usage] = []
        # By choice that has begun: characters so far, and the offsets of its next tokens.
        self._lengths: dict[int, int] = {}
        self._offsets: dict[int, TextOffsets] = {}
        usage = ',"usage":null' if request.include_usage else ""
        self._running = RunningUsage() if request.counts_on else None
        # A chunk is these, with the choice's number and its text between them.
        self._before = server_sent({**head.to_json("text_completion"), "choices": []})[:-4] + b'{"index":'
        self._after = f',"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'.encode()
        shows_tokens = request.logprobs is not None or request.return_token_ids
        self._is_plain = not (shows_tokens or request.echo or request.counts_on)

    def chunk(self, place: int, event: GenerateEvent) -> bytes:
        """What a stream says of an event of the prompt at `place`; nothing where that is nothing."""
        kind = event.WhichOneof("event")
        if self._running is not None:
            self._running.see(event)
        if kind == "prompt_logprobs":
            self._prompts[place].logprobs.MergeFrom(event.prompt_logprobs)
        elif kind == "final":
            self._usages.append(event.final.usage)
        elif kind == "delta":
            return self.delta_chunk(place, event.delta)
        return b""

    def delta_chunk(self, place: int, delta: Delta) -> bytes:
        """As `chunk`, of a delta that is counted already."""
        if self._is_plain and not delta.finish_reason:
            if not delta.text:
                return b""
            index = place * self._request.n + delta.choice
            return b'%b%d,"text":%b%b' % (self._before, index, quote(delta.text).encode(), self._after)
        chunk = {**self._head.to_json("text_completion"), "choices": [self._choice(place, delta)]}
        if self._request.include_usage:
            chunk["usage"] = self._running.to_json() if self._running is not None else None
        return server_sent(chunk)

    def writer_of_large(self, place: int, event: GenerateEvent) -> "CompletionResponse | None":
        """See large_answer.Streamed. Large is the first delta of each choice of a long prompt, since it shows the
        prompt."""
        delta = event.delta
        if not event.HasField("delta") or place * self._request.n + delta.choice in self._lengths:
            return None
        if self._prompt_values(self._prompts[place], self._prompts[place].logprobs) <= LARGE_VALUES:
            return None
        if self._running is not None:
            self._running.see(event)
        made = copy(self)
        made._prompts, made._offsets, made._lengths = {place: self._prompts[place]}, {}, {}
        index, offsets = self._begin(place, delta)
        if delta.logprobs:
            offsets.of([score.token_id for score in delta.logprobs])
        echo = self._prompts[place].echo if self._request.echo else ""
        self._lengths[index] = len(echo) + (0 if self._request.scores_only else len(delta.text))
        return made

    def values(self, responses: Sequence[GenerateResponse]) -> int:
        """See large_answer.Whole."""
        prompts = sum(
            self._prompt_values(self._prompts[place], response.prompt_logprobs)
            for place, response in enumerate(responses)
        )
        return self._request.n * prompts + sum(count_values(response.choices) for response in responses)

    def _prompt_values(self, prompt: ShownPrompt, logprobs: PromptLogprobs) -> int:
        """About how many values of a choice are of its prompt."""
        return len(prompt.token_ids) + count_scored(logprobs) + count_text(prompt.echo)

    def end(self) -> bytes:
        """The last words of a stream."""
        if not self._request.include_usage:
            return DONE
        usage = usage_json(self._usages, self._request.scores_only)
        return server_sent({**self._head.to_json("text_completion"), "choices": [], "usage": usage}) + DONE

    def whole(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The one object of an answer that does not stream."""
        choices = []
        for place, response in enumerate(responses):
            self._prompts[place].logprobs = response.prompt_logprobs
            for delta in response.choices:
                choice = self._choice(place, delta)
                if self._request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._tokens.prompt(response.prompt_logprobs.tokens)
                choices.append(choice)
        usage = usage_json((response.final.usage for response in responses), self._request.scores_only)
        return {**self._head.to_json("text_completion"), "choices": choices, "usage": usage}

    def _begin(self, place: int, delta: Delta) -> tuple[int, TextOffsets]:
        """The number of a choice that begins now, and the offsets of its own tokens."""
        index = place * self._request.n + delta.choice
        start = len(self._prompts[place].echo) if self._request.echo else 0
        self._offsets[index] = self._tokens.offsets(self._request.skip_special_tokens, start)
        return index, self._offsets[index]

    def _choice(self, place: int, delta: Delta) -> dict[str, Any]:
        request, prompt = self._request, self._prompts[place]
        index = place * request.n + delta.choice
        first = index not in self._lengths
        if first:
            self._begin(place, delta)
        text = "" if request.scores_only else delta.text
        logprobs: Iterable[TokenLogprob | int] = () if request.scores_only else delta.logprobs
        token_ids = [] if request.scores_only else list(delta.token_ids)
        offsets = [] if request.scores_only else self._offsets[index].of([score.token_id for score in delta.logprobs])
        if first and request.echo:
            text = prompt.echo + text
            # A list of a million TokenLogprob objects takes 26 to 57 s: each address is hashed.
            logprobs = chain(prompt.token_ids[:1], prompt.logprobs.tokens, logprobs)
            if request.logprobs is not None:
                sent = prompt.echo if prompt.is_text else None
                offsets = [*self._tokens.prompt_offsets(prompt.token_ids, sent), *offsets]
        length = self._lengths[index] = self._lengths.get(index, 0) + len(text)
        if delta.finish_reason:  # a stop string may have cut the text before its last tokens
            offsets = [min(offset, length) for offset in offsets]
        made: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if request.scores_only else REASONS[delta.finish_reason],
            "stop_reason": stop_reason(delta),
        }
        if request.logprobs is not None:
            made["logprobs"] = self._tokens.completion(logprobs, offsets)
        if request.return_token_ids:
            made["token_ids"] = token_ids
            if first:
                made["prompt_token_ids"] = list(prompt.token_ids)
        return made
