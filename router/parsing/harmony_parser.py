"""HarmonyParser: gpt-oss' format of messages in channels, as text with its special tokens.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|channel|>final<|message|>the answer<|return|>

openai-harmony's parser is not used: it needs the vocabulary files of its own tokenizer, which it loads from the web.
"""

import re
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Final

from coatcheck.router.parsing.parts import Part, Reasoning
from coatcheck.router.parsing.tool_parser import MarkedText, ToolParser

MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
ANALYSIS: Final = f"<|channel|>analysis{MESSAGE}"  # what a message of reasoning begins with
MARKERS: Final = ("<|start|>", "<|end|>", "<|channel|>", MESSAGE, "<|constrain|>", "<|call|>", "<|return|>")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=(?P<prefix>functions\.)?(?P<name>[A-Za-z0-9_.-]+)")
_WORDS: Final = ("assistant", "commentary", "json")  # what a header may have before its first marker, with a recipient
_MAX_HEADER: Final = 512  # characters, with MESSAGE


class _Body(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    HIDDEN = auto()  # a message to one of the model's built-in tools


class HarmonyParser(ToolParser):
    """`functions`: a message to one of these names is a tool call. None: messages to functions are content."""

    def __init__(self, functions: Collection[str] | None, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._functions = functions
        self._has_arguments = False  # whether the call that is being read has arguments so far
        self._body = _Body.HEADER
        self._ends = MarkedText(_ENDS)
        self._length = 0  # characters of the text so far
        self.reasoning_spans: list[tuple[int, int]] = []  # see OutputParser

    def feed(self, text: str) -> list[Part]:
        self._length += len(text)
        return super().feed(text)

    def _advance(self) -> None:
        while self._read_header() if self._body is _Body.HEADER else self._read_body():
            pass

    def _read_header(self) -> bool:
        end = self._buffer.find(MESSAGE, 0, _MAX_HEADER)
        if not _may_be_header(self._buffer) or (end < 0 and len(self._buffer) >= _MAX_HEADER):
            self._body = _Body.CONTENT
            return True
        if end < 0:
            return False
        header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and not recipient["prefix"] and recipient["name"] not in (self._functions or ()):
            recipient = None  # a built-in tool
        if recipient is not None and self._functions is not None:
            self._start_call(recipient["name"])
            self._body, self._has_arguments = _Body.CALL, False
        elif channel is not None and channel[1] == "analysis":
            self._body = _Body.REASONING
        elif "to=" in header and recipient is None:
            self._body = _Body.HIDDEN
        else:
            self._body = _Body.CONTENT
        return True

    def _read_body(self) -> bool:
        found = self._ends.find(self._buffer)
        if found is None:
            count = self._ends.count_certain(self._buffer)
            self._add_body(self._buffer[:count])
            self._buffer = self._buffer[count:]
            return False
        at, marker = found
        self._add_body(self._buffer[:at])
        if self._body is _Body.CALL and not self._has_arguments:
            self._add_arguments("{}")
        keeps_marker = marker in ("<|start|>", "<|channel|>")
        self._buffer = self._buffer[at if keeps_marker else at + len(marker) :]
        self._body = _Body.HEADER
        return True

    def _add_body(self, text: str) -> None:
        match self._body:
            case _Body.REASONING:
                self._parts.append(Reasoning(text))
                start = self._length - len(self._buffer)  # the buffer begins with `text`
                if self.reasoning_spans and self.reasoning_spans[-1][1] == start:
                    start, _ = self.reasoning_spans.pop()
                self.reasoning_spans.append((start, self._length - len(self._buffer) + len(text)))
            case _Body.CALL:
                self._has_arguments = self._has_arguments or bool(text.strip())
                self._add_arguments(text)
            case _Body.CONTENT:
                self._add_content(text)
            case _:
                pass

    def _end(self) -> None:
        if self._body is _Body.HEADER and not any(sign in self._buffer for sign in (*MARKERS, "to=")):
            self._body = _Body.CONTENT  # an answer such as "assistant", and no header that was cut
        if self._body is not _Body.HEADER:
            self._add_body(self._buffer)
        self._buffer = ""


def _may_be_header(text: str) -> bool:
    """Whether a message's header begins with the text, or is a beginning of the text."""
    words, sign, rest = text.partition("<")
    whole = words.split()
    last = whole.pop() if whole and not sign and not words[-1].isspace() else ""
    if not all(word in _WORDS or _RECIPIENT.fullmatch(word) for word in whole):
        return False
    if sign:
        marked = sign + rest
        return any(marked.startswith(marker) or marker.startswith(marked) for marker in MARKERS)
    return any(word.startswith(last) for word in (*_WORDS, "to=")) or bool(_RECIPIENT.fullmatch(last))


def harmony_rules(token_ids: Mapping[str, int]) -> str:
    """Rules in llguidance's dialect of Lark for what comes before the answer: reasoning, and the header of the final
    channel. `token_ids`: of MARKERS."""
    named = {name: f"<[{token_ids[name]}]>" for name in MARKERS}
    channel, message = named["<|channel|>"], named[MESSAGE]
    thinking = f'{channel} "analysis" {message} /(?s:.*)/ {named["<|end|>"]} {named["<|start|>"]} "assistant"'
    return f'start: ({thinking})? {channel} "final" {message}\n'
