"""ReasoningCounter: how many tokens of a choice are reasoning, for the usage of a response."""

from bisect import bisect_left
from collections.abc import Sequence

from coatcheck.router.parsing.output_parser import OutputParser
from coatcheck.router.text.text_offsets import TextOffsets


class ReasoningCounter:
    """The counter of one choice. A token counts if a part of its text is between the markers of reasoning; tokens of
    the markers do not count. `offsets`: those of the choice's tokens in the text that `parser` gets."""

    def __init__(self, parser: OutputParser, offsets: TextOffsets) -> None:
        self._parser = parser
        self._offsets = offsets
        self._starts: list[int] = []  # by token, in characters

    def feed(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens of the text that the parser gets next. Takes about a microsecond for each."""
        self._starts += self._offsets.next_offsets(token_ids)

    def count(self) -> int:
        """The tokens of the reasoning in the parser's text so far."""
        return sum(self._count_between(start, stop) for start, stop in self._parser.reasoning_spans)

    def _count_between(self, start: int, stop: int) -> int:
        if start == stop:
            return 0
        first = bisect_left(self._starts, start)
        # The token before may end in the span. The last token of the text has no successor, and ends with the text.
        if first > 0 and (self._starts[first] if first < len(self._starts) else stop) > start:
            first -= 1
        return bisect_left(self._starts, stop) - first
