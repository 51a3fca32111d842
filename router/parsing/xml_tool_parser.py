"""XmlToolParser: tool calls whose arguments are tags, such as <parameter=city>Bonn</parameter>.

The tags have no types, so argument_values.py derives a value's type from the schema. Each argument is streamed when its
tag ends.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coatcheck.router.parsing.argument_values import json_argument
from coatcheck.router.parsing.tool_parser import MAX_HEADER, MarkedText, ToolParser

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each function


@dataclass(frozen=True)
class XmlCallFormat:
    """How a model writes a call: `call_start`, the function's name, `name_end`; for each argument `argument_start`, its
    name, `key_end`, perhaps `value_start`, its value and `argument_end`; then `call_end`. White space between all of
    these is allowed, and quotation marks around names may be missing. `separator`: what may follow the name if
    `name_end` is empty. `index_attribute`: the attribute of a call's tag with the number of the call. `type_attribute`:
    the attribute of an argument's tag that is "true" or "string" if the value is a string; any other value is JSON.
    `object_start`, `object_end`: the tags around all arguments as one JSON object, in place of tagged arguments.
    `dropped`: markers around calls."""

    call_start: str
    name_end: str
    argument_start: str
    key_end: str
    argument_end: str
    call_end: str
    value_start: str = ""
    separator: str = ""
    index_attribute: str = ""
    type_attribute: str = ""
    object_start: str = ""
    object_end: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        return (*self.openings, self.call_end)

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers that may begin a call."""
        return (self.trigger, *self.dropped)

    @cached_property
    def trigger(self) -> str:
        """What begins a call."""
        return self.call_start.removesuffix('"')

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """Matches a call up to its first argument, with group `name`."""
        if not self.name_end:
            first = f"(?={re.escape(self.argument_start)}|{re.escape(self.call_end)})"
            between = rf"(?:{re.escape(self.separator)}\s*)?"
            return re.compile(rf"{re.escape(self.call_start)}\s*(?P<name>[A-Za-z0-9_.-]{{1,128}})\s*{between}{first}")
        more = r'(?:\s+\w+="[^"<>\n]*")*\s*' if self.index_attribute else ""
        end = _literal(self.name_end, more)
        return re.compile(rf'{_literal(self.call_start)}(?P<name>\s*[^"<>\s][^"<>\n]{{0,127}}){end}')

    @cached_property
    def argument(self) -> re.Pattern[str]:
        """Matches the beginning of an argument, up to its value, with groups `key` and perhaps `type`."""
        start = _literal(self.argument_start)
        if self.value_start:
            return re.compile(rf"{start}(?P<key>[^<>]+){_literal(self.key_end)}\s*{re.escape(self.value_start)}")
        more = rf'(?:\s+{self.type_attribute}="?(?P<type>\w+)"?)?\s*' if self.type_attribute else ""
        return re.compile(rf'{start}(?P<key>[^"<>\n]+){_literal(self.key_end, more)}')


def _literal(marker: str, attributes: str = "") -> str:
    """The pattern for a marker, whose quotation marks may be missing. `attributes`: a pattern for what may follow the
    quotation mark with which the marker begins."""
    return re.escape(marker).replace('"', f'"?{attributes}')


class XmlToolParser(ToolParser):
    """See XmlCallFormat."""

    def __init__(self, form: XmlCallFormat, schemas: Schemas, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._form = form
        self._schemas = schemas
        self._marked = MarkedText(form.openings)
        argument_start = form.argument_start.removesuffix('"')
        inner = (argument_start, form.call_end, *((form.object_start,) if form.object_start else ()))
        self._in_call = MarkedText((*inner, *form.openings))
        self._in_value = MarkedText((form.argument_end, argument_start, form.call_end))
        self._skips_space = True  # before the text and after a call
        self._function: str | None = None  # of the call that the buffer is in
        self._has_arguments = False
        self._is_whole = False  # the call has all of its arguments as one object
        self._is_malformed = False  # the call has text that belongs to no argument
        self._searched = 0  # where an argument's end was not found yet

    def _advance(self) -> None:
        while self._read_call() if self._function is not None else self._read_text():
            pass

    def _read_text(self) -> bool:
        if self._skips_space:
            text = self._buffer.lstrip()
            is_open = any(marker.startswith(text) and marker != text for marker in self._form.openings)
            if is_open and len(self._buffer) <= MAX_HEADER:
                return False
            if text.startswith(self._form.openings):
                self._buffer = text
            self._skips_space = False
        marker = self._take_text(self._marked)
        if marker is None:
            return False
        if marker != self._form.trigger:
            self._buffer = self._buffer[len(marker) :]
            self._skips_space = True
            return True
        opening = self._form.opening.match(self._buffer, 0, MAX_HEADER)
        if opening is not None:
            self._function = opening["name"].strip()
            self._has_arguments = self._is_whole = self._is_malformed = False
            self._start_call(self._function)
            self._buffer = self._buffer[opening.end() :]
            return True
        if len(self._buffer) <= MAX_HEADER:
            return False
        self._add_content(marker)
        self._buffer = self._buffer[len(marker) :]
        return True

    def _read_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        argument = self._form.argument.match(self._buffer, 0, MAX_HEADER)
        if argument is not None:
            found = self._find_value_end(argument.end())
            if found is None:
                return False
            self._add_argument(argument, found[0])
            self._buffer, self._searched = self._buffer[found[1] :], 0
            return True
        if self._buffer.startswith(self._form.call_end):
            self._buffer = self._buffer[len(self._form.call_end) :]
            self._close_call()
            return True
        if self._form.object_start and self._buffer.startswith(self._form.object_start):
            return self._read_arguments_object()
        return self._skip_unknown()

    def _find_value_end(self, start: int) -> tuple[int, int] | None:
        """(where the value ends that begins at `start`, where its end tag ends); None if more text is needed.

        Models leave out end tags. So a value also ends before the next argument, if that begins on a new line or has a
        tag for its value as well, and before an end of the call that only a marker or nothing follows.
        """
        form, at = self._form, max(start, self._searched)
        while (found := self._in_value.find(self._buffer[at:])) is not None:
            at, marker = at + found[0], found[1]
            behind = at + len(marker)
            self._searched = at
            if marker == form.argument_end:
                return at, behind
            is_over = self._is_call_over(behind) if marker == form.call_end else self._is_argument(at, behind)
            if is_over is None:
                return None
            if is_over:
                return at, at
            self._searched = at = behind
        longest = max(len(form.argument_start), len(form.argument_end), len(form.call_end))
        self._searched = max(at, len(self._buffer) - longest + 1)
        return None

    def _is_argument(self, at: int, behind: int) -> bool | None:
        """Whether another argument begins at `at`; None if more text is needed."""
        before = self._buffer[max(0, at - MAX_HEADER) : at]
        if not self._form.value_start and not before.rstrip(" \t").endswith("\n"):
            return False
        if self._form.argument.match(self._buffer, at, at + MAX_HEADER):
            return True
        if len(self._buffer) - at >= MAX_HEADER or self._in_value.find(self._buffer[behind:]) is not None:
            return False
        return None

    def _is_call_over(self, behind: int) -> bool | None:
        """Whether text from `behind` on begins with a marker around calls; None if more text is needed."""
        rest = self._buffer[behind:].lstrip()
        if len(self._buffer) - behind - len(rest) > MAX_HEADER:
            return False
        if rest.startswith(self._form.openings):
            return True
        return None if any(marker.startswith(rest) for marker in self._form.openings) else False

    def _add_argument(self, argument: re.Match[str], end: int) -> None:
        key, text = argument["key"].strip(), self._buffer[argument.end() : end]
        self._add_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        is_string = bool(self._form.type_attribute) and argument["type"] in ("true", "string")
        self._add_arguments(json.dumps(text, ensure_ascii=False) if is_string else self._json_value(key, text))
        self._has_arguments = True

    def _read_arguments_object(self) -> bool:
        start, marker = len(self._form.object_start), self._form.object_end
        end = self._buffer.find(marker, max(start, self._searched))
        if end < 0:
            self._searched = len(self._buffer) - len(marker) + 1
            return False
        if not self._has_arguments and not self._is_whole:
            self._add_arguments(self._buffer[start:end].strip())
            self._is_whole = True
        self._buffer, self._searched = self._buffer[end + len(marker) :], 0
        return True

    def _close_call(self) -> None:
        if not self._is_whole:
            self._add_arguments("}" if self._has_arguments else "{}")
        self._function, self._skips_space = None, True

    def _skip_unknown(self) -> bool:
        """Drops text in a call that belongs to no argument. A marker that cannot be in a call ends the call."""
        found = self._in_call.find(self._buffer)
        if found is None:
            count = self._in_call.count_certain(self._buffer)
            self._is_malformed = self._is_malformed or bool(self._buffer[:count].strip())
            self._buffer = self._buffer[count:]
            return False
        at, marker = found
        self._is_malformed = self._is_malformed or bool(self._buffer[:at].strip())
        self._buffer = self._buffer[at:]
        if at:
            return True
        if self._form.argument_start.startswith(marker):
            rest = self._buffer[len(marker) :]
            if len(rest) <= MAX_HEADER and self._in_call.find(rest) is None:
                return False
            self._buffer, self._is_malformed = rest, True
        else:
            self._close_call()
        return True

    def _json_value(self, key: str, text: str) -> str:
        """The argument as JSON text."""
        text = text.removeprefix("\n").removesuffix("\n")
        return json_argument(self._schemas.get(self._function or "", {}), key, text)

    def _end(self) -> None:
        if self._function is not None:
            self._end_call()
        elif not self._skips_space or self._buffer.strip():
            self._release_buffer()
        self._buffer = ""

    def _end_call(self) -> None:
        """Ends the call whose end tag is missing, unless an argument is cut, which has no value."""
        argument = self._form.argument.match(self._buffer, 0, MAX_HEADER)
        text = self._buffer.rstrip()
        if argument is not None and text.endswith(self._form.call_end):
            self._add_argument(argument, len(text) - len(self._form.call_end))
        elif self._is_malformed or not self._form.call_end.startswith(text):
            self._is_cut = True
            return
        self._close_call()
