"""CompletionAnswer: the core's events as text completions, whole or chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...proto.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, TokenLogprob, Usage
from .answer import DONE, REASONS, Head, RunningUsage, quote, server_sent, stop_reason, usage_json
from .completion_request import CompletionRequest
from .json_body import LARGE_VALUES
from .text_offsets import TextOffsets
from .token_text import TokenText


@dataclass(slots=True)
class ShownPrompt:
    """One prompt of a request. `echo`: its text if the request asks for it, else "". `token_ids`: empty unless they are
    shown. `offsets`: for logprobs, where each token begins in `echo`."""

    echo: str = ""
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)


class CompletionAnswer:
    """Made per request; `chunk` and `end` for a stream, `whole` otherwise."""

    def __init__(
        self, head: Head, request: CompletionRequest, prompts: Sequence[ShownPrompt], tokens: TokenText
    ) -> None:
        self._head = head
        self._request = request
        self._prompts = prompts
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
            self._prompts[place].logprobs.extend(event.prompt_logprobs.tokens)
        elif kind == "final":
            self._usages.append(event.final.usage)
        elif kind == "delta":
            delta = event.delta
            if self._is_plain and not delta.finish_reason:
                if not delta.text:
                    return b""
                index = place * self._request.n + delta.choice
                return b'%b%d,"text":%b%b' % (self._before, index, quote(delta.text).encode(), self._after)
            in_thread = self.is_slow_to_encode(place, event)  # asked before _choice, which marks the choice as begun
            chunk = {**self._head.to_json("text_completion"), "choices": [self._choice(place, delta)]}
            if self._request.include_usage:
                chunk["usage"] = self._running.to_json() if self._running is not None else None
            return server_sent(chunk, in_thread=in_thread)
        return b""

    def is_slow_to_encode(self, place: int, event: GenerateEvent) -> bool:
        """See event_stream.Answer. True for a choice's first delta if the prompt is long, since that delta shows it."""
        prompt = self._prompts[place]
        has_begun = place * self._request.n + event.delta.choice in self._lengths
        is_long = max(len(prompt.token_ids), len(prompt.logprobs)) > LARGE_VALUES
        return event.HasField("delta") and is_long and not has_begun

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
            self._prompts[place].logprobs.extend(response.prompt_logprobs.tokens)
            for delta in response.choices:
                choice = self._choice(place, delta)
                if self._request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._tokens.prompt(response.prompt_logprobs.tokens)
                choices.append(choice)
        usage = usage_json((response.final.usage for response in responses), self._request.scores_only)
        return {**self._head.to_json("text_completion"), "choices": choices, "usage": usage}

    def _choice(self, place: int, delta: Delta) -> dict[str, Any]:
        request, prompt = self._request, self._prompts[place]
        index = place * request.n + delta.choice
        first = index not in self._lengths
        text = "" if request.scores_only else delta.text
        logprobs: list[TokenLogprob | int] = [] if request.scores_only else list(delta.logprobs)
        token_ids = [] if request.scores_only else list(delta.token_ids)
        if first:
            start = len(prompt.echo) if request.echo else 0
            self._offsets[index] = self._tokens.offsets(request.skip_special_tokens, start)
        offsets = self._offsets[index].of([score.token_id for score in delta.logprobs]) if logprobs else []
        if first and request.echo:
            text = prompt.echo + text
            logprobs = [*prompt.token_ids[:1], *prompt.logprobs, *logprobs]
            offsets = [*prompt.offsets, *offsets]
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
