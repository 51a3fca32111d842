"""ReasoningParser: splits the text of a choice into reasoning and the rest, at the markers that the model writes."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from coatcheck.router.parsing.parts import Content, Part, Reasoning, join_parts
from coatcheck.router.parsing.tool_parser import MAX_HEADER


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. `label`: text after the start marker that is not part of the reasoning.

    A format with channels has `answer_start`, with which the answer begins, after reasoning behind `answer_header`.
    `dropped`: the markers of channels in the answer, which are not content.
    """

    start: str
    end: str
    label: str = ""
    answer_header: str = ""
    answer_start: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def opening(self) -> str:
        """The start marker with its label."""
        return self.start + self.label


class ReasoningStart(Enum):
    """Where a prompt ends: inside of reasoning (OPEN), after it (CLOSED), or before it, if the model reasons at all
    (UNDECIDED)."""

    OPEN = "open"
    CLOSED = "closed"
    UNDECIDED = "undecided"


class ReasoningParser:
    """The parser of one choice. White space next to the markers is dropped."""

    def __init__(self, form: ReasoningFormat, start: ReasoningStart) -> None:
        self._form = form
        self._buffer = ""
        self._is_open = start is ReasoningStart.OPEN
        self._is_decided = start is ReasoningStart.CLOSED
        self._skips_space = False  # before the answer
        self._has_reasoning = False
        self._length = 0  # characters of the text so far
        self._num_dropped = 0  # white space at the end of reasoning that has no end
        self._span: tuple[int, int | None] = (0, None if self._is_open else 0)

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._is_open

    def remove_last(self, count: int) -> None:
        """Shortens the span of the reasoning by its last `count` characters, which turned out to be no reasoning."""
        self._span = (self._span[0], self._length - self._num_dropped - count)

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """See OutputParser."""
        start, stop = self._span
        return [(start, self._length if stop is None else stop)]

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of text; returns reasoning and content."""
        self._length += len(text)
        if self._is_decided and not self._is_open and not self._skips_space:
            return [Content(text)] if text else []
        self._buffer += text
        return join_parts(self._advance())

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        text, self._buffer = self._buffer, ""
        if self._skips_space:
            return []
        if not self._is_open:
            return join_parts([Content(text)])
        self._num_dropped = len(text) - len(text.rstrip())
        return join_parts([Reasoning(text.rstrip())])

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        if not self._is_decided and not self._decide():
            return parts
        if self._is_open:
            parts.append(Reasoning(self._take_reasoning()))
        if not self._is_open:
            if self._skips_space:
                self._buffer = self._buffer.lstrip()
                self._skips_space = not self._buffer
            parts.append(Content(self._buffer))
            self._buffer = ""
        return parts

    def _decide(self) -> bool:
        """Decides whether the text begins with reasoning, and drops its start marker. Returns False if the text is too
        short to decide."""
        text = self._buffer.lstrip()
        opening, end = self._form.opening, self._form.end
        may_be_end = not self._is_open and end.startswith(text) and text != end
        if (opening.startswith(text) or may_be_end) and len(self._buffer) <= MAX_HEADER:
            return False
        if text.startswith(opening):
            self._buffer = text[len(opening) :]
            self._is_open = True
            self._span = (self._length - len(self._buffer), None)
        elif not self._is_open and text.startswith(end):  # how MiniMax M3 begins an answer without reasoning
            self._buffer, self._skips_space = text[len(end) :], True
        self._is_decided = True
        return True

    def _take_reasoning(self) -> str:
        """The reasoning that is certain now. Ends the reasoning at its end marker."""
        end = self._buffer.find(self._form.end)
        if end >= 0:
            self._span = (self._span[0], self._length - len(self._buffer) + end)
            text, self._buffer = self._buffer[:end].rstrip(), self._buffer[end + len(self._form.end) :]
            self._is_open, self._skips_space = False, True
        else:
            kept = _held_start(self._buffer, self._form.end)
            text, self._buffer = self._buffer[:kept], self._buffer[kept:]
        if not self._has_reasoning:
            text = text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        return text


def _held_start(text: str, marker: str) -> int:
    """Where the end of `text` starts that is white space or may begin `marker`."""
    end = len(text)
    for start in range(max(0, end - len(marker) + 1), end):
        if marker.startswith(text[start:]):
            end = start
            break
    return max(len(text[:end].rstrip()), end - MAX_HEADER)


_ANYTHING: Final = "/(?s:.*)/"
_SPACE: Final = r"/\s{0,8}/"  # some models would write spaces without end


# What special tokens in a marker look like; the last one is MiniMax M3's.
_TOKENS: Final = re.compile(r"(<[|｜][^<>|｜]+[|｜]>|]<]minimax\[>\[)")


def reasoning_rules(form: ReasoningFormat, start: ReasoningStart, special_ids: Mapping[str, int]) -> str:
    """Rules in llguidance's dialect of Lark for the reasoning before a structure; "" if the prompt ends after it.
    `special_ids`: the ids of markers that are special tokens, which no text of a grammar matches."""
    if start is ReasoningStart.CLOSED:
        return ""
    end = marker_rule(form.end, special_ids)
    if begins_with_token(form.end, special_ids):
        rules = f"thinking: {_ANYTHING} {end}\n"
    else:
        rules = f"thinking[suffix={end}]: {_ANYTHING}\n"
    behind, without = _SPACE, ""
    if form.answer_start:
        behind = marker_rule(form.answer_header + form.answer_start, special_ids)
        without = marker_rule(form.answer_start, special_ids)
    if start is ReasoningStart.OPEN:
        return f"start: thinking {behind}\n{rules}"
    opening = " ".join(
        filter(None, (marker_rule(form.start, special_ids), json.dumps(form.label) if form.label else ""))
    )
    if without:
        return f"start: {opening} thinking {behind} | {without}\n{rules}"
    return f"start: ({opening} thinking {behind})?\n{rules}"


def marker_rule(marker: str, special_ids: Mapping[str, int]) -> str:
    """A marker in a rule: its special tokens, and the text between them."""
    if marker in special_ids:
        return f"<[{special_ids[marker]}]>"
    parts, text = [], ""
    for piece in (*_TOKENS.split(marker), ""):
        if piece in special_ids:
            parts += [json.dumps(text, ensure_ascii=False)] if text else []
            parts.append(f"<[{special_ids[piece]}]>")
            text = ""
        else:
            text += piece
    return " ".join([*parts, json.dumps(text, ensure_ascii=False)] if text else parts)


def begins_with_token(marker: str, special_ids: Mapping[str, int]) -> bool:
    """Whether a marker begins with a special token, or is one."""
    return marker_rule(marker, special_ids).startswith("<[")


def has_token(marker: str, special_tokens: Collection[str]) -> bool:
    """Whether a marker is a special token, or has one in it."""
    return marker in special_tokens or any(piece in special_tokens for piece in _TOKENS.findall(marker))
