"""LogprobsChunk: a chunk of a stream whose log-probabilities a side process encodes.

With all log-probabilities of a large vocabulary a token's chunk is 10 MB of JSON. Encoding that would stop the event
loop. The event loop encodes the chunk with null in their place, and a side process replaces the null.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob
from coatcheck.router.http.json_response import json_bytes
from coatcheck.router.openai.logprobs_format import LogprobsFormatter

# In a chunk of one choice these bytes occur only as the choice's field: JSON escapes the quotes within a text.
_FIELD: Final = b'"logprobs":'
_NULL_FIELD: Final = _FIELD + b"null"


@dataclass(frozen=True, slots=True)
class ChoiceLogprobs:
    """The field `logprobs` of a choice, not yet JSON.

    `offsets`: of the tokens in the text of a text completion; None for a chat. `num_values`: about how many
    log-probabilities the generated tokens have, without those of the prompt.
    """

    formatter: LogprobsFormatter
    tokens: Iterable[TokenLogprob | int]
    offsets: Sequence[int] | None
    num_values: int

    def to_json(self) -> dict[str, Any]:
        if self.offsets is None:
            return self.formatter.chat_logprobs(token for token in self.tokens if not isinstance(token, int))
        return self.formatter.completion_logprobs(self.tokens, self.offsets)


@dataclass(frozen=True, slots=True)
class LogprobsChunk:
    """A LargeChunk. `chunk`: the event of one choice, with null as its `logprobs`. `logprobs`: what replaces the
    null."""

    chunk: bytes
    logprobs: ChoiceLogprobs

    @classmethod
    def split(cls, chunk: bytes, logprobs: ChoiceLogprobs) -> "LogprobsChunk":
        """Copies the tokens into a list, because an iterator cannot be pickled."""
        return cls(chunk, replace(logprobs, tokens=list(logprobs.tokens)))

    def write(self) -> bytes:
        """The chunk with its log-probabilities."""
        before, _, after = self.chunk.partition(_NULL_FIELD)
        return b"".join((before, _FIELD, json_bytes(self.logprobs.to_json()), after))
