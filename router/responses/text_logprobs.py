"""TextLogprobs: the log-probabilities of the tokens that the text of a message consists of.

An answer also has tokens of reasoning, of markers and of calls, and the parser holds some text back. So the parser gets
the text token by token, and each token is assigned to the part that contains its text.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, TokenLogprob
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.parsing.output_parser import OutputParser
from coatcheck.router.parsing.parts import Content, Part

Logprobs: TypeAlias = list[dict[str, Any]]  # of the tokens of a part, in OpenAI's form


class TextLogprobs:
    """The log-probabilities of one choice. It feeds the choice's `parser`."""

    def __init__(self, parser: OutputParser, formatter: LogprobsFormatter, *, skips_special_tokens: bool) -> None:
        """`skips_special_tokens`: the text does not contain special tokens."""
        self._parser = parser
        self._formatter = formatter
        self._offsets = formatter.offsets(skips_special_tokens, 0)
        self._length = 0  # characters of the choice so far
        self._held: list[tuple[str, TokenLogprob]] = []  # tokens whose text is in no part yet

    def feed_delta(self, delta: Delta, *, is_last: bool) -> list[tuple[Part, Logprobs]]:
        """The parts that are certain now, each with the log-probabilities of its tokens if it is a text."""
        found: list[tuple[Part, Logprobs]] = []
        for text, token in self._split(delta):
            self._held.append((text, token))
            found += [(part, self._take_logprobs(part)) for part in self._parser.feed(text)]
        rest = delta.text if not delta.logprobs else ""
        found += [(part, self._take_logprobs(part)) for part in self._parser.feed_delta(rest, is_last=is_last)]
        return found

    def _split(self, delta: Delta) -> Iterator[tuple[str, TokenLogprob]]:
        """The text of each token of the delta. A stop string may have cut the text before the last tokens."""
        starts = self._offsets.next_offsets([token.token_id for token in delta.logprobs])
        end = self._length + len(delta.text)
        at = self._length
        for index, token in enumerate(delta.logprobs):
            stop = min(end, starts[index + 1]) if index + 1 < len(starts) else end
            yield delta.text[at - self._length : max(at, stop) - self._length], token
            at = max(at, stop)
        self._length = end

    def _take_logprobs(self, part: Part) -> Logprobs:
        """The log-probabilities of the tokens of `part`, the last of the held tokens. The held tokens before them
        belong to markers. Empty for a part that is not a text."""
        held, self._held = self._held, []
        if not isinstance(part, Content):
            return []
        length = sum(len(text) for text, _ in held)
        while length > len(part.text) and length - len(held[0][0]) >= len(part.text):
            length -= len(held.pop(0)[0])
        logprobs: Logprobs = self._formatter.chat_logprobs(token for _, token in held)["content"]
        return logprobs
