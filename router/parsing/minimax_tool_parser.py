"""MinimaxToolParser: MiniMax M3's tool calls, whose arguments are tags with the names of the arguments.

    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Bonn]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>]<]minimax[>[</invoke>

A value with tags in it is an object, or a list if its tags are items. Each argument is streamed when its tag ends.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck.router.parsing.argument_values import find_items, find_property, find_types, json_value
from coatcheck.router.parsing.tool_parser import MAX_HEADER, MarkedText, ToolParser

MARK: Final = "]<]minimax[>["  # before each tag
_INVOKE: Final = f"{MARK}<invoke name="
OPENINGS: Final = (_INVOKE, f"{MARK}<tool_call>", f"{MARK}</tool_call>")
_OPENING: Final = re.compile(rf'{re.escape(_INVOKE)}"?\s*(?P<name>[^"<>\s][^"<>\n]{{0,127}}?)\s*"?>')
_TAG: Final = re.compile(rf"{re.escape(MARK)}\s*<(?P<slash>/?)(?P<name>[^<>]{{1,128}})>")
_OUTER: Final = ("invoke", "tool_call")  # the tags around arguments


@dataclass(slots=True)
class _Value:
    """The text of a tag and the tags in it. `start`, `end`: where the text is in the buffer."""

    name: str
    start: int
    end: int = 0
    children: list["_Value"] = field(default_factory=list)


class MinimaxToolParser(ToolParser):
    """`schemas`: of the parameters of each function, which have the types of values."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._schemas = schemas
        self._marked = MarkedText(OPENINGS)
        self._in_call = MarkedText((MARK,))
        self._function: str | None = None  # of the call that the buffer is in
        self._has_arguments = False
        self._is_malformed = False  # the call has text that belongs to no argument
        self._open: list[_Value] = []  # the argument with which the buffer begins, and the tags in it that are open
        self._searched = 0  # where the search for tags in the argument goes on

    def _advance(self) -> None:
        while self._read_call() if self._function is not None else self._read_text():
            pass

    def _read_text(self) -> bool:
        marker = self._take_text(self._marked)
        if marker is None:
            return False
        if marker != _INVOKE:
            self._buffer, self._skips_space = self._buffer[len(marker) :], True
            return True
        opening = _OPENING.match(self._buffer, 0, MAX_HEADER)
        if opening is not None:
            self._function, self._has_arguments, self._is_malformed = opening["name"], False, False
            self._start_call(self._function)
            self._buffer = self._buffer[opening.end() :]
            return True
        if len(self._buffer) < MAX_HEADER:
            return False
        self._add_content(marker)
        self._buffer = self._buffer[len(marker) :]
        return True

    def _read_call(self) -> bool:
        if self._open:
            return self._read_argument()
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_INVOKE):  # the end of the call before is missing
            self._close_call()
            return True
        tag = _TAG.match(self._buffer, 0, MAX_HEADER)
        if tag is None:
            return self._skip_unknown()
        self._buffer = self._buffer[tag.end() :]
        if tag["name"].strip() in _OUTER:
            self._close_call()
        elif not tag["slash"]:
            self._open, self._searched = [_Value(tag["name"].strip(), 0)], 0
        return True

    def _read_argument(self) -> bool:
        """Finds the tags in the argument. A tag around arguments ends the argument if its end tag is missing."""
        while (at := self._buffer.find(MARK, self._searched)) >= 0:
            self._searched = at
            tag = _TAG.match(self._buffer, at, at + MAX_HEADER)
            is_call = self._buffer.startswith(_INVOKE, at)
            if tag is None and not is_call:
                if len(self._buffer) - at < MAX_HEADER and self._buffer.find(MARK, at + 1) < 0:
                    return False
                self._searched = at + len(MARK)
                continue
            name = tag["name"].strip() if tag is not None else ""
            names = [value.name for value in self._open]
            if is_call or (name in _OUTER and name not in names):
                self._end_argument(at, at)
                return True
            assert tag is not None
            self._searched = tag.end()
            if not tag["slash"]:
                self._open.append(_Value(name, tag.end()))
                self._open[-2].children.append(self._open[-1])
            elif name in names:
                while self._open[-1].name != name:
                    self._open.pop().end = at
                if len(self._open) == 1:
                    self._end_argument(at, tag.end())
                    return True
                self._open.pop().end = at
        self._searched = max(self._searched, len(self._buffer) - len(MARK) + 1)
        return False

    def _end_argument(self, at: int, end: int) -> None:
        """Adds the argument whose text ends at `at`, and drops the buffer up to `end`."""
        for value in self._open:
            value.end = at
        argument, parameters = self._open[0], self._schemas.get(self._function or "", {})
        schema = find_property(parameters, parameters, argument.name)
        try:
            made = _Reader(self._buffer, parameters).read(argument, schema)
        except RecursionError:
            made = json.dumps(self._buffer[:at], ensure_ascii=False)
        start = ", " if self._has_arguments else "{"
        self._add_arguments(f"{start}{json.dumps(argument.name, ensure_ascii=False)}: {made}")
        self._has_arguments, self._open = True, []
        self._buffer, self._searched = self._buffer[end:], 0

    def _skip_unknown(self) -> bool:
        """Drops text in a call that belongs to no argument."""
        at = self._buffer.find(MARK)
        if at == 0:
            if len(self._buffer) < MAX_HEADER and self._buffer.find(MARK, 1) < 0:
                return False
            at = len(MARK)
        count = at if at > 0 else self._in_call.count_certain(self._buffer)
        self._is_malformed = self._is_malformed or bool(self._buffer[:count].strip())
        self._buffer = self._buffer[count:]
        return at > 0

    def _close_call(self) -> None:
        self._add_arguments("}" if self._has_arguments else "{}")
        self._function, self._skips_space = None, True

    def _end(self) -> None:
        if self._function is None:
            self._release_buffer()
        elif self._open or self._is_malformed or self._buffer.strip():
            self._is_cut = True  # an argument that is cut has no value
        else:
            self._close_call()
        self._buffer = ""


class _Reader:
    """`text`: where the values are. `parameters`: the function's schema."""

    def __init__(self, text: str, parameters: Mapping[str, Any]) -> None:
        self._text = text
        self._parameters = parameters

    def read(self, value: _Value, schema: object) -> str:
        """The value as JSON text. A value with text beside its tags is the text with its tags."""
        text = self._text[value.start : value.end]
        types = find_types(self._parameters, schema)
        if not value.children:
            if not text.strip() and types and types <= {"array", "object"}:
                return "[]" if "array" in types else "{}"
            return json_value(self._parameters, schema, text)
        if self._has_text(value):
            return json.dumps(text, ensure_ascii=False)
        if all(child.name == "item" for child in value.children) and ("array" in types or "object" not in types):
            items = find_items(self._parameters, schema)
            return f"[{', '.join(self.read(child, items) for child in value.children)}]"
        made: dict[str, list[str]] = {}
        for child in value.children:
            part = find_property(self._parameters, schema, child.name)
            made.setdefault(child.name, []).append(self.read(child, part))
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {_join(values)}" for name, values in made.items())
        return f"{{{', '.join(pairs)}}}"

    def _has_text(self, value: _Value) -> bool:
        """Whether text other than white space is beside the tags of the value."""
        at = value.start
        for child in value.children:
            before = self._text[at : child.start]
            if before[: before.find(MARK)].strip():
                return True
            tag = _TAG.match(self._text, child.end)
            at = tag.end() if tag is not None and tag["slash"] and tag["name"].strip() == child.name else child.end
        return bool(self._text[at : value.end].strip())


def _join(values: list[str]) -> str:
    """One value, or a list of several of one name."""
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
