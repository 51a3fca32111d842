"""JsonToolParser: tool calls whose arguments are a JSON object, which is streamed as it is generated.

In a wrapped call the arguments are inside of another object: {"name": "f", "arguments": {...}}. In a bare call the name
comes before the arguments, as in `[TOOL_CALLS]f[ARGS]{...}`.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from coatcheck.router.parsing.tool_parser import MAX_HEADER, MarkedText, ToolParser

_STRING: Final = r'"(?:[^"\\]|\\.)+"'
# A wrapped call whose arguments can be streamed: the name comes first.
_NAMED: Final = re.compile(rf'\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_KEYED: Final = re.compile(rf"\{{\s*(?P<name>{_STRING})\s*:\s*(?=\{{)")
# The beginning of what JsonCallFormat.following matches.
_FOLLOWING_BEGUN: Final = re.compile(r",\s*(?P<name>[A-Za-z0-9_.-]{0,128})(?P<marker>\[[A-Z_]{0,16}\]?)?")
_OUTSIDE: Final = re.compile(r'["{}\[\]<]')
_INSIDE: Final = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """How a model writes calls.

    `triggers`: what begins a call, or a list of calls. `starts_text`: a call may also be all of the text, without a
    trigger. It then needs arguments, because an answer in JSON may have a name too. `bare`: patterns that match from
    the trigger to the arguments of a bare call, with groups `name` and perhaps `id`. `wrapped`: matches from the
    trigger to the object of a wrapped call. `closers`: what may follow a call. `separators`: what is between two
    wrapped calls. `following`: matches a comma after a bare call and the name of the next call, as `bare`; without a
    group `name` it matches a comma before a trigger. `dropped`: further markers, which are not content. `is_keyed`: a
    wrapped call is {"f": {...}}. `is_required`: a grammar allows only a list of wrapped calls.
    """

    triggers: tuple[str, ...] = ()
    starts_text: bool = False
    bare: tuple[re.Pattern[str], ...] = ()
    wrapped: re.Pattern[str] | None = None
    closers: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    following: re.Pattern[str] | None = None
    dropped: tuple[str, ...] = ()
    is_keyed: bool = False
    is_required: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens."""
        return (*self.openings, *self.closers)

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers that may begin a call."""
        return (*self.triggers, *self.dropped)


class _State(Enum):
    START = auto()  # no text yet but whitespace
    TEXT = auto()
    HEADER = auto()  # the buffer begins with a trigger, or with the text's first bracket
    OBJECT = auto()  # the buffer begins with a wrapped call's "{"
    ARGUMENTS = auto()
    WRAPPER = auto()  # between the arguments and the end of a wrapped call
    CLOSING = auto()  # after a call


class JsonToolParser(ToolParser):
    """See JsonCallFormat. With `is_required` a grammar allows nothing but calls, so no text is content."""

    def __init__(self, form: JsonCallFormat, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._form = form
        self._marked = MarkedText(form.openings)
        self._state = _State.START
        self._scanner = JsonScanner()
        self._is_wrapped = False
        self._is_marked = False  # a trigger comes before the call
        self._before = ""  # text before the object of a wrapped call; content if the object turns out not to be a call
        self._scanned = 0  # characters of that object that the scanner has seen
        self._is_closed = False  # the list of required calls has ended

    def _advance(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Handles a part of the buffer; returns False if more text is needed."""
        match self._state:
            case _State.START:
                return self._begin()
            case _State.TEXT:
                return self._show_text()
            case _State.HEADER:
                return self._read_header()
            case _State.OBJECT:
                return self._read_object()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.WRAPPER:
                return self._skip_wrapper()
            case _:
                return self._close_call()

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            if self._form.is_required:
                self._buffer = ""
            elif len(self._buffer) > MAX_HEADER:
                self._state = _State.TEXT
                return True
            return False
        is_call = self._form.starts_text and text[0] in "{["
        if is_call or any(text.startswith(trigger) for trigger in self._form.triggers):
            self._buffer = self._buffer if is_call else text
            self._state, self._is_marked = _State.HEADER, not is_call
        elif any(marker.startswith(text) for marker in self._form.openings):
            return False
        else:
            self._state = _State.TEXT
        return True

    def _show_text(self) -> bool:
        marker = self._take_text(self._marked)
        if marker is None:
            return False
        if marker in self._form.dropped:
            self._buffer = self._buffer[len(marker) :]
            self._skips_space = True
        else:
            self._state, self._is_marked = _State.HEADER, True
        return True

    def _read_header(self) -> bool:
        form = self._form
        for pattern in form.bare:
            if found := pattern.match(self._buffer, 0, MAX_HEADER):
                self._begin_call(found["name"], found.groupdict().get("id") or "", found.end(), is_wrapped=False)
                return True
        if form.wrapped is not None and (found := form.wrapped.match(self._buffer, 0, MAX_HEADER)):
            rest = self._buffer[found.end() :]
            if rest.startswith("{"):
                self._begin_object(self._buffer[: found.end()], rest)
                return True
            if not rest:
                return False
            if not form.bare:
                return self._give_up(found.end())
        if len(self._buffer) > MAX_HEADER:
            return self._give_up(1)
        return False

    def _begin_object(self, before: str, text: str) -> None:
        self._before, self._buffer = before, text
        self._scanner, self._scanned = JsonScanner(), 0
        self._state = _State.OBJECT

    def _read_object(self) -> bool:
        found = (_KEYED if self._form.is_keyed else _NAMED).match(self._buffer, 0, MAX_HEADER)
        if found is not None and (name := _parse_string(found["name"])) is not None:
            self._begin_call(name, "", found.end(), is_wrapped=True)
            return True
        end = self._scanner.feed(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return False
        end += self._scanned
        text = self._buffer[:end]
        call = parse_keyed_call(text) if self._form.is_keyed else None
        call = call or parse_call(text, needs_arguments=not self._is_marked)
        if call is None:
            self._buffer = self._before + self._buffer
            return self._give_up(len(self._before) + end)
        name, arguments = call
        self._is_wrapped = True
        self._start_call(name)
        self._add_arguments(arguments)
        self._buffer = self._buffer[end:]
        self._state = _State.CLOSING
        return True

    def _begin_call(self, name: str, call_id: str, header: int, *, is_wrapped: bool) -> None:
        """`header`: characters of the buffer before the arguments."""
        self._start_call(name, call_id)
        self._buffer = self._buffer[header:]
        self._scanner = JsonScanner()
        self._is_wrapped = is_wrapped
        self._state = _State.ARGUMENTS

    def _read_arguments(self) -> bool:
        if not self._buffer:
            return False
        end = self._scanner.feed(self._buffer)
        self._add_arguments(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._scanner = JsonScanner(depth=1)
            self._state = _State.WRAPPER if self._is_wrapped else _State.CLOSING
        return end is not None

    def _skip_wrapper(self) -> bool:
        end = self._scanner.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = _State.CLOSING
        return end is not None

    def _close_call(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            self._buffer = self._buffer[-MAX_HEADER:]
            return False
        for separator in self._form.separators:
            if text.startswith(separator):
                rest = text[len(separator) :].lstrip()
                if rest.startswith("{"):
                    self._begin_object(separator, rest)
                    return True
                if not rest:
                    self._buffer = self._buffer[: 2 * MAX_HEADER]
                    return False
        if self._form.following is not None and not self._is_wrapped:
            if found := self._form.following.match(text, 0, MAX_HEADER):
                if found["name"]:
                    self._begin_call(found["name"], "", len(self._buffer) - len(text) + found.end(), is_wrapped=False)
                else:
                    self._buffer, self._state = text[found.end() :], _State.TEXT
                return True
            if len(text) <= MAX_HEADER and _FOLLOWING_BEGUN.fullmatch(text):
                return False
        for closer in self._form.closers:
            if text.startswith(closer):
                self._buffer = text[len(closer) :]
                self._is_closed = True
                return True
            if closer.startswith(text):
                return False
        self._buffer = self._buffer.lstrip("\n")
        self._state = _State.TEXT
        return True

    def _give_up(self, count: int) -> bool:
        """Makes the first `count` characters content: they are not a call."""
        self._add_content(self._buffer[:count])
        self._buffer = self._buffer[count:]
        self._state = _State.TEXT
        return True

    def _end(self) -> None:
        state = self._state
        self._is_cut = state is _State.ARGUMENTS or (self._form.is_required and not self._is_closed)
        if state in (_State.HEADER, _State.OBJECT) and not self._form.is_required:
            self._buffer = (self._before if state is _State.OBJECT else "") + self._buffer
            self._release_buffer()
        elif state in (_State.START, _State.TEXT) and not self._skips_space:
            self._release_buffer()
        elif state is _State.CLOSING and self._form.following is not None:
            found = _FOLLOWING_BEGUN.match(self._buffer.lstrip())
            if found is not None and found["name"]:
                self._buffer = self._buffer.lstrip("\n")
                self._release_buffer()
        self._buffer = ""


class NamedCallParser(ToolParser):
    """All of the text is the arguments of the function `name`, which tool_choice names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _advance(self) -> None:
        if self._buffer:
            if not self._count:
                self._start_call(self._name)
            self._add_arguments(self._buffer)
            self._buffer = ""

    def _end(self) -> None:
        pass


def parse_call(text: str, *, needs_arguments: bool = False) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a wrapped call; None if the text is not a call. `needs_arguments`: an object
    without arguments is not a call."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(inner := value.get("function"), dict):
        value = inner
    # Cohere's models write "tool_name".
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not name or not isinstance(name, str):
        return None
    if needs_arguments and value.keys().isdisjoint(("arguments", "parameters")):
        return None
    arguments = value.get("arguments", value.get("parameters")) or {}
    if isinstance(arguments, str):
        return name, arguments
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def parse_keyed_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call {"f": {...}}; None if the text is none."""
    try:
        value: Any = json.loads(text)
        if not isinstance(value, dict) or len(value) != 1:
            return None
        ((name, arguments),) = value.items()
        if not name or not (arguments is None or isinstance(arguments, dict | str)):
            return None
        if isinstance(arguments, str):
            return name, arguments or "{}"
        return name, json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _parse_string(text: str) -> str | None:
    """The string that the JSON text means; None if an escape or a character in it is not JSON's."""
    try:
        value: str = json.loads(text)
    except ValueError:
        return None
    return value


class JsonScanner:
    """`depth`: how many objects and lists are open before the first piece. Checks only brackets and quotes. A "<"
    outside of a string also ends the value: a marker begins there, and the model has left out closing brackets."""

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Takes the next piece. Returns the index in `text` after the end of the value, or None if it goes on."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            match found[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case "<":
                    return at - 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
