"""OutputParser: splits the text of a choice into reasoning, content and tool calls while it is generated.

ReasoningCounter: how many tokens of a choice are reasoning, for the usage of a response.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from coatcheck.router.parsing.answer_tags import AnswerTags, ChannelMarkers
from coatcheck.router.parsing.custom_call_reader import CustomCallReader
from coatcheck.router.parsing.gemma_tool_parser import GemmaToolParser
from coatcheck.router.parsing.harmony_parser import HarmonyParser
from coatcheck.router.parsing.json_tool_parser import JsonCallFormat, JsonToolParser, NamedCallParser
from coatcheck.router.parsing.minimax_tool_parser import MinimaxToolParser
from coatcheck.router.parsing.output_format import (
    REQUIRED_CALLS,
    GemmaCallFormat,
    HarmonyCallFormat,
    MinimaxCallFormat,
    OutputFormat,
    PythonicCallFormat,
)
from coatcheck.router.parsing.parts import Content, Part, Reasoning, join_parts
from coatcheck.router.parsing.pythonic_tool_parser import PythonicToolParser
from coatcheck.router.parsing.reasoning_parser import ReasoningParser, ReasoningStart
from coatcheck.router.parsing.tool_parser import ToolParser
from coatcheck.router.parsing.unclosed_reasoning import UnclosedReasoning
from coatcheck.router.parsing.xml_tool_parser import XmlToolParser
from coatcheck.router.text.text_offsets import TextOffsets

ToolMode = Literal["none", "auto", "required", "named"]
_PIECE: Final = 4096  # characters; a parser copies the rest of a piece after each marker in it


@dataclass(frozen=True, slots=True)
class ParsingPlan:
    """How the choices of one request are parsed.

    `reasoning_start`: see find_reasoning_start. `tool_mode`: whether tools may or must be called; with "named" all
    content is the arguments of `named_function`. `schemas`: of each function's parameters. `max_calls`: further calls
    are dropped. `separates_reasoning`: reasoning is not part of the content. `shows_reasoning`: separated reasoning is
    returned and not dropped. `custom_tools`: the functions that stand for custom tools.
    """

    output_format: OutputFormat = field(default_factory=OutputFormat)
    reasoning_start: ReasoningStart = ReasoningStart.UNDECIDED
    tool_mode: ToolMode = "none"
    named_function: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_calls: int | None = None
    separates_reasoning: bool = True
    shows_reasoning: bool = True
    custom_tools: Collection[str] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all text is content as it is."""
        return self.tool_mode == "none" and not self.output_format.has_reasoning

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must contain special tokens. The parser needs them, and removes them."""
        return self.output_format.shows_special_tokens and not self.is_plain

    def make_tool_parser(self) -> ToolParser | None:
        """The parser of the calls in content."""
        if self.tool_mode == "none":
            return None
        if self.tool_mode == "named":
            return NamedCallParser(self.named_function)
        if self.tool_mode == "required":
            return JsonToolParser(REQUIRED_CALLS, self.max_calls)
        match self.output_format.calls:
            case JsonCallFormat() as calls:
                return JsonToolParser(calls, self.max_calls)
            case PythonicCallFormat():
                return PythonicToolParser(self.max_calls)
            case GemmaCallFormat():
                return GemmaToolParser(self.schemas, self.max_calls)
            case MinimaxCallFormat():
                return MinimaxToolParser(self.schemas, self.max_calls)
            case HarmonyCallFormat():
                return None  # channels have the calls
            case calls:
                return XmlToolParser(calls, self.schemas, self.max_calls)


class OutputParser:
    """The parser of one choice."""

    def __init__(self, plan: ParsingPlan) -> None:
        self._plan = plan
        self._tools = plan.make_tool_parser()
        self._customs = CustomCallReader(plan.custom_tools) if plan.custom_tools else None
        self._first: HarmonyParser | ReasoningParser | None = None
        self._unclosed: UnclosedReasoning | None = None
        self._tags: AnswerTags | ChannelMarkers | None = None
        reasoning = plan.output_format.reasoning
        if isinstance(plan.output_format.calls, HarmonyCallFormat):
            functions = plan.schemas if plan.tool_mode == "auto" else None
            self._first = HarmonyParser(functions, plan.max_calls)
        elif reasoning is not None and plan.separates_reasoning:
            self._first = ReasoningParser(reasoning, plan.reasoning_start)
            if plan.output_format.answer_tags is not None:
                self._tags = AnswerTags(*plan.output_format.answer_tags)
            if plan.tool_mode == "auto":
                self._unclosed = UnclosedReasoning(plan.output_format.calls.openings, plan.make_tool_parser)
        if reasoning is not None and reasoning.dropped:
            self._tags = ChannelMarkers(reasoning.dropped)

    @property
    def has_complete_calls(self) -> bool:
        """Whether there is a call, and none was cut."""
        parsers = (self._tools, self._first)
        return any(parser.has_complete_calls for parser in parsers if isinstance(parser, ToolParser))

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """Where the text so far has reasoning, from its start marker to its end marker: (start, stop) in characters.
        Empty if the plan does not separate reasoning."""
        return self._first.reasoning_spans if self._first is not None else []

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of text; returns the parts that are certain now."""
        if len(text) <= _PIECE:
            parts = self._feed_piece(text)
        else:
            pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
            parts = join_parts(part for piece in pieces for part in self._feed_piece(piece))
        return parts if self._customs is None else self._customs.read(parts)

    def feed_delta(self, text: str, *, is_last: bool) -> list[Part]:
        """As `feed`; with `is_last` also what `finish` returns."""
        parts = self.feed(text)
        return [*parts, *self.finish()] if is_last else parts

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        parts = self._pass_on(self._split(self._first.finish(), is_last=True)) if self._first is not None else []
        if self._tags is not None:
            parts += self._pass_content(self._tags.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        if self._customs is not None:
            parts = [*self._customs.read(parts), *self._customs.finish()]
        return join_parts(parts)

    def _feed_piece(self, text: str) -> list[Part]:
        return self._pass_on(self._split(self._first.feed(text)) if self._first is not None else [Content(text)])

    def _split(self, parts: list[Part], *, is_last: bool = False) -> list[Part]:
        """The parts; calls at the end of reasoning that has no end marker become content (see UnclosedReasoning)."""
        if self._unclosed is None or not isinstance(self._first, ReasoningParser):
            return parts
        made: list[Part] = []
        for part in parts:
            if isinstance(part, Reasoning):
                made += self._unclosed.feed(part.text)
            else:
                made += [*self._unclosed.release_text(), part]
        if is_last and self._first.is_open and (calls := self._unclosed.calls_at_end()):
            self._first.remove_last(len(calls))
            return [*made, Content(calls)]
        if is_last or not self._first.is_open:
            made += self._unclosed.release_text()
        return made

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        """The parts; the calls in their content become ToolCallDeltas."""
        passed: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                passed += self._pass_content(self._tags.feed(part.text) if self._tags is not None else part.text)
            elif not isinstance(part, Reasoning) or self._plan.shows_reasoning:
                passed.append(part)
        return join_parts(passed)

    def _pass_content(self, text: str) -> list[Part]:
        """The content and the calls of `text`."""
        return self._tools.feed(text) if self._tools is not None else [Content(text)]


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
