"""CustomCallReader: turns the calls of custom tools, which models write as calls of functions, into their inputs.

The function has one argument, `input` (see tool_grammars/input_grammar.py), whose text is streamed while its JSON is
generated. Models also write the input itself in place of the arguments, or give the argument another name.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from coatcheck.router.parsing.parts import Part, ToolCallDelta, join_parts

_OPENING: Final = re.compile(r'\s{0,64}\{\s{0,64}"input"\s{0,64}:\s{0,64}"')
_HIGH: Final = r"u[dD][89abAB][0-9a-fA-F]{2}"
# The arguments up to the first character of the input, cut anywhere.
_CUT_OPENING: Final = re.compile(
    r'\s{0,64}(?:\{\s{0,64}(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s{0,64}(?::\s{0,64})?)?)?)?)?)?)?)?)?'
)
# A piece of a JSON string: text with short escapes, a pair of surrogates, another escape, a wrong one, or the end.
_PIECE: Final = re.compile(
    r'(?P<text>(?:[^"\\]++|\\["\\/bfnrt])+)'
    rf"|\\(?P<pair>{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}})|\\(?P<code>u[0-9a-fA-F]{{4}})"
    r'|(?P<wrong>\\.)|(?P<end>")',
    re.DOTALL,
)
# The beginning of an escape. Behind the first half of a pair more text may follow.
_HELD: Final = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}}|{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?)?")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_UNKNOWN: Final = "\ufffd"


class CustomCallReader:
    """One for each choice. `names`: of the custom tools."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index: int | None = None  # of the custom call that is open
        self._input = _InputReader()

    def read(self, parts: Sequence[Part]) -> list[Part]:
        """The parts, in which the arguments of custom calls are inputs."""
        made: list[Part] = []
        for part in parts:
            if not isinstance(part, ToolCallDelta):
                made += [*self.finish(), part]
                continue
            if part.name:
                made += self.finish()
            if part.name in self._names:
                self._index, self._input = part.index, _InputReader()
                made.append(replace(part, arguments="", is_custom=True))
            if part.index != self._index:
                made.append(part)
            elif text := self._input.feed(part.arguments):
                made.append(ToolCallDelta(part.index, text, is_custom=True))
        return join_parts(made)

    def finish(self) -> list[Part]:
        """The rest of the input of the open call, which ends it."""
        if self._index is None:
            return []
        rest = ToolCallDelta(self._index, self._input.finish(), is_custom=True)
        self._index = None
        return [rest] if rest.arguments else []


class _InputReader:
    """Reads the arguments of one call."""

    def __init__(self) -> None:
        self._buffer = ""
        self._is_plain = False  # the arguments are the input itself
        self._is_string = False  # the buffer is in the string of the argument `input`
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """The next piece of the input."""
        if self._is_over:
            return ""
        self._buffer += arguments
        if not (self._is_plain or self._is_string):
            self._decide()
        if self._is_plain:
            text, self._buffer = self._buffer, ""
            return text
        return self._read_string() if self._is_string else ""

    def finish(self) -> str:
        """The rest of the input, at the end of the arguments."""
        text, self._buffer = self._buffer, ""
        if self._is_over:
            return ""
        if self._is_string:  # it was cut; half of a pair of surrogates is a character that is not known
            return _UNKNOWN if text.startswith("\\u") else ""
        return "" if _CUT_OPENING.fullmatch(text) else _SURROGATE.sub(_UNKNOWN, _input_of(text))

    def _decide(self) -> None:
        if (begun := _OPENING.match(self._buffer)) is not None:
            self._is_string, self._buffer = True, self._buffer[begun.end() :]
        elif (text := self._buffer.lstrip()) and not text.startswith(("{", '"')):
            self._is_plain = True

    def _read_string(self) -> str:
        made, at = [], 0
        while at < len(self._buffer):
            if _HELD.fullmatch(self._buffer, at):
                break
            found = _PIECE.match(self._buffer, at)
            assert found is not None, "each character begins a piece or is held"
            at = found.end()
            match found.lastgroup:
                case "end":
                    self._is_over = True
                    break
                case "text" | "pair":
                    made.append(json.loads(f'"{found[0]}"', strict=False))
                case "code":
                    one = chr(int(found["code"][1:], 16))
                    made.append(_UNKNOWN if "\ud800" <= one <= "\udfff" else one)
                case _:
                    made.append(found[0])
        self._buffer = self._buffer[at:]
        return "".join(made)


def _input_of(arguments: str) -> str:
    """The input in arguments of another form: the argument `input`, else the only argument, else all of the arguments
    as they are. No arguments are an empty input."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and ("input" in value or len(value) <= 1):
        value = value.get("input", next(iter(value.values()), ""))
    elif isinstance(value, dict):
        value = arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
