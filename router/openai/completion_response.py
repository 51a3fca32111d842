"""CompletionResponse: makes text completions, or the chunks of a stream, from GenerateService's events."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import FINISH_REASON_LENGTH, Delta, TokenLogprob
from coatcheck.router.http.json_response import LARGE_VALUES
from coatcheck.router.openai.completion_request import CompletionRequest
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
from coatcheck.router.serving.logprob_limits import count_values
from coatcheck.router.text.text_offsets import TextOffsets


class CompletionResponse(OpenAIResponse):
    """The choices of prompt i have the indices i*n to i*n + n-1."""

    kind = chunk_kind = "text_completion"
    plain_choice = (b',"text":', b"")

    def __init__(
        self,
        head: ResponseHead,
        request: CompletionRequest,
        prompts: Sequence[EchoedPrompt],
        formatter: LogprobsFormatter,
    ) -> None:
        super().__init__(head, request, formatter, prompts, is_plain=not (request.echo or request.logprobs is not None))
        self._request = request
        # By the index of a choice that has begun: its characters so far, and the offsets of its next tokens.
        self._lengths: dict[int, int] = {}
        self._offsets: dict[int, TextOffsets] = {}

    def make_delta_chunk(self, prompt_index: int, delta: Delta) -> bytes | LargeChunk:
        index = prompt_index * self._request.n + delta.choice
        prompt = self._prompts[prompt_index]
        if index not in self._lengths and prompt.count_values(prompt.logprobs) > LARGE_VALUES:
            return self._first_chunk(prompt_index, delta)
        if self._is_plain and not delta.finish_reason:
            return self._make_plain_chunk(index, delta.text) if delta.text else b""
        return self._make_chunk(self._choice(prompt_index, delta))

    def write_chunk(self, prompt_index: int, delta: Delta) -> bytes:
        """The chunk of a delta, of any size."""
        return self._write_chunk(self._choice(prompt_index, delta))

    def _first_chunk(self, prompt_index: int, delta: Delta) -> "_FirstChunk":
        """The first chunk of a choice, with the echo of the prompt. A copy of this response makes the chunk. This
        response updates the choice's offsets and length, so that its next chunks continue there."""
        prompt = self._prompts[prompt_index]
        writer = copy(self)
        writer._prompts, writer._offsets, writer._lengths = {prompt_index: prompt}, {}, {}
        index, offsets = self._begin_choice(prompt_index, delta)
        if delta.logprobs:
            offsets.next_offsets([score.token_id for score in delta.logprobs])
        echo = prompt.echo if self._request.echo else ""
        self._lengths[index] = len(echo) + (0 if self._request.scores_only else len(delta.text))
        return _FirstChunk(writer, prompt_index, delta)

    def make_choice(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        made = with_logprobs(self._choice(prompt_index, delta))
        choice = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None, **made}
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._formatter.prompt_logprobs(self._prompts[prompt_index].logprobs.tokens)
        return choice

    def _usage(self) -> dict[str, Any]:
        """As in the base class. If only the prompt is scored, the one generated token is not counted."""
        usage = super()._usage()
        if self._request.scores_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _begin_choice(self, prompt_index: int, delta: Delta) -> tuple[int, TextOffsets]:
        """(index of a choice that begins now, offsets of its generated tokens)."""
        index = prompt_index * self._request.n + delta.choice
        start = len(self._prompts[prompt_index].echo) if self._request.echo else 0
        self._offsets[index] = self._formatter.offsets(self._request.skip_special_tokens, start)
        return index, self._offsets[index]

    def _choice(self, prompt_index: int, delta: Delta) -> dict[str, Any]:
        request, prompt = self._request, self._prompts[prompt_index]
        if request.scores_only:  # the generated token is not shown
            delta = Delta(choice=delta.choice, finish_reason=FINISH_REASON_LENGTH)
        index = prompt_index * request.n + delta.choice
        is_first = index not in self._lengths
        if is_first:
            self._begin_choice(prompt_index, delta)
        text = delta.text
        logprobs: Iterable[TokenLogprob | int] = delta.logprobs
        offsets = self._offsets[index].next_offsets([score.token_id for score in delta.logprobs])
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
            "finish_reason": FINISH_REASONS[delta.finish_reason],
            "stop_reason": stop_reason(delta),
        }
        if request.logprobs is not None:
            choice["logprobs"] = ChoiceLogprobs(self._formatter, logprobs, offsets, count_values(delta.logprobs))
        if request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice


@dataclass(frozen=True, slots=True)
class _FirstChunk:
    """The first chunk of a choice, as a LargeChunk. `response`: a copy that makes only this chunk."""

    response: CompletionResponse
    prompt_index: int
    delta: Delta

    def write(self) -> bytes:
        return self.response.write_chunk(self.prompt_index, self.delta)
