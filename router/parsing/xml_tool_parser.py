"""XmlToolParser: tool calls whose arguments are tags, such as <parameter=city>Bonn</parameter>.

The tags have no types: argument_values.py says what a value means. Each argument is streamed when its tag ends.
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
    name, `key_end`, perhaps `value_start`, its value and `argument_end`; then `call_end`. White space may stand between
    all of these, and quotation marks around names may be missing. `separator`: what may stand behind the name if it
    has no `name_end`. `dropped`: markers around calls. `marks_strings`: the tag of an argument has the attribute
    string="true" if its value is a string, and string="false" if it is JSON."""

    call_start: str
    name_end: str
    argument_start: str
    key_end: str
    argument_end: str
    call_end: str
    value_start: str = ""
    separator: str = ""
    dropped: tuple[str, ...] = ()
    marks_strings: bool = False

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
        return re.compile(
            rf'{_literal(self.call_start)}(?P<name>\s*[^"<>\s][^"<>\n]{{0,127}}){_literal(self.name_end)}'
        )

    @cached_property
    def argument(self) -> re.Pattern[str]:
        """Matches the beginning of an argument, up to its value, with groups `key` and perhaps `is_string`."""
        start, end = _literal(self.argument_start), _literal(self.key_end)
        if self.value_start:
            return re.compile(rf"{start}(?P<key>[^<>]+){end}\s*{re.escape(self.value_start)}")
        if self.marks_strings:
            end = rf'"?(?:\s+string="?(?P<is_string>true|false)"?)?\s*{end.removeprefix(chr(34) + "?")}'
        return re.compile(rf'{start}(?P<key>[^"<>\n]+){end}')


def _literal(marker: str) -> str:
    """The pattern for a marker, whose quotation marks may be missing."""
    return re.escape(marker).replace('"', '"?')


class XmlToolParser(ToolParser):
    """See XmlCallFormat."""

    def __init__(self, form: XmlCallFormat, schemas: Schemas, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._form = form
        self._schemas = schemas
        self._marked = MarkedText(form.openings)
        self._in_call = MarkedText((form.argument_start.removesuffix('"'), form.call_end, *form.openings))
        self._skips_space = True  # before the text and after a call
        self._function: str | None = None  # of the call that the buffer is in
        self._has_arguments = False
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
            self._function, self._has_arguments = opening["name"].strip(), False
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
            marker = self._form.argument_end
            end = self._buffer.find(marker, max(argument.end(), self._searched))
            if end < 0:
                self._searched = len(self._buffer) - len(marker) + 1
                return False
            key, text = argument["key"].strip(), self._buffer[argument.end() : end]
            self._add_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            is_string = self._form.marks_strings and argument["is_string"] == "true"
            self._add_arguments(json.dumps(text, ensure_ascii=False) if is_string else self._json_value(key, text))
            self._has_arguments = True
            self._buffer, self._searched = self._buffer[end + len(marker) :], 0
            return True
        if self._buffer.startswith(self._form.call_end):
            self._buffer = self._buffer[len(self._form.call_end) :]
            self._close_call()
            return True
        return self._skip_unknown()

    def _close_call(self) -> None:
        self._add_arguments("}" if self._has_arguments else "{}")
        self._function, self._skips_space = None, True

    def _skip_unknown(self) -> bool:
        """Drops text in a call that belongs to no argument. A marker that cannot be in a call ends the call."""
        found = self._in_call.find(self._buffer)
        if found is None:
            self._buffer = self._buffer[self._in_call.count_certain(self._buffer) :]
            return False
        at, marker = found
        self._buffer = self._buffer[at:]
        if at:
            return True
        if self._form.argument_start.startswith(marker):
            rest = self._buffer[len(marker) :]
            if len(rest) <= MAX_HEADER and self._in_call.find(rest) is None:
                return False
            self._buffer = rest
        else:
            self._close_call()
        return True

    def _json_value(self, key: str, text: str) -> str:
        """The argument as JSON text."""
        text = text.removeprefix("\n").removesuffix("\n")
        return json_argument(self._schemas.get(self._function or "", {}), key, text)

    def _end(self) -> None:
        if self._function is not None:
            self._is_cut = True  # an argument that is cut has no value
        elif not self._skips_space or self._buffer.strip():
            self._release_buffer()
        self._buffer = ""
