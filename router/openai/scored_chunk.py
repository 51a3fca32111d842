"""ScoredChunk: a chunk of a stream whose log-probabilities are written in a side process.

With all log-probabilities of a large vocabulary a token's chunk is 10 MB of JSON, which would stop the event loop. The
event loop writes the chunk without them, and a side process puts them in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob
from coatcheck.router.http.json_response import json_bytes
from coatcheck.router.openai.logprobs_format import LogprobsFormatter

# In a chunk with one choice these bytes are its field: within a text the quotes are escaped.
_PLACE: Final = b'"logprobs":null'


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """The field `logprobs` of a choice, not yet JSON. `offsets`: of a text completion's tokens; None for a chat.
    `num_values`: about how many log-probabilities of generated tokens it has."""

    formatter: LogprobsFormatter
    tokens: Iterable[TokenLogprob | int]
    offsets: Sequence[int] | None
    num_values: int

    def to_json(self) -> dict[str, Any]:
        if self.offsets is None:
            return self.formatter.chat_logprobs(token for token in self.tokens if not isinstance(token, int))
        return self.formatter.completion_logprobs(self.tokens, self.offsets)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Can be pickled."""

    chunk: bytes
    scores: ChoiceScores

    @classmethod
    def split(cls, chunk: bytes, scores: ChoiceScores) -> "ScoredChunk":
        """`chunk`: of one choice, whose `logprobs` is null."""
        tokens = list(scores.tokens)
        return cls(chunk, ChoiceScores(scores.formatter, tokens, scores.offsets, scores.num_values))

    def write(self) -> bytes:
        """The chunk with its log-probabilities."""
        before, _, after = self.chunk.partition(_PLACE)
        return b"".join((before, _PLACE[:-4], json_bytes(self.scores.to_json()), after))
