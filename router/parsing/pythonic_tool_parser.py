"""PythonicToolParser: tool calls that are a list of Python calls, such as [weather(city="Bonn")].

A list is parsed when its last bracket or its end marker has come, so all of its calls are streamed at once. Between
<function_calls> and </function_calls> (Olmo 3) there is a call on each line, without brackets.
"""

import ast
import json
import re
from typing import Any, Final

from coatcheck.router.parsing.tool_parser import MarkedText, ToolParser

# The markers before and after calls: of Llama 4, LFM2 and Olmo 3.
MARKERS: Final = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}
_LIST: Final = re.compile(r"\[\s*[A-Za-z_][\w.-]*\s*\(")
_LIST_BEGUN: Final = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*)?")
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAMES: Final = {"true": True, "false": False, "null": None}
_MAX_CHARACTERS: Final = 1 << 16  # of a list; Python's parser takes 0.1 s for this many


class PythonicToolParser(ToolParser):
    """A list of calls is all of the text, or is between markers; other text is content."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._marked = MarkedText(tuple(MARKERS))
        self._may_be_list = True  # all of the text
        self._start = ""  # the marker with which the buffer begins
        self._searched = 0  # characters after it in which the end marker was not found

    def _advance(self) -> None:
        while self._read_marked() if self._start else self._read_text():
            pass

    def _read_text(self) -> bool:
        if self._may_be_list:
            text = self._buffer.lstrip()
            is_open = any(start.startswith(text) and start != text for start in MARKERS)
            is_open = is_open or bool(_LIST_BEGUN.fullmatch(text) or _LIST.match(text))
            if is_open and len(self._buffer) <= _MAX_CHARACTERS:
                return False
            self._may_be_list = False
            if text.startswith(tuple(MARKERS)):
                self._buffer = text
        self._start = self._take_text(self._marked) or ""
        return bool(self._start)

    def _read_marked(self) -> bool:
        end = MARKERS[self._start]
        at = self._buffer.find(end, len(self._start) + self._searched)
        if at >= 0:
            self._read_list(self._buffer[: at + len(end)])
            self._buffer = self._buffer[at + len(end) :]
        elif len(self._buffer) > _MAX_CHARACTERS:
            self._release_buffer()
        else:
            self._searched = max(0, len(self._buffer) - len(self._start) - len(end) + 1)
            return False
        self._start, self._searched = "", 0
        return True

    def _read_list(self, text: str) -> None:
        """Adds the calls in `text`, which may include the markers. A text without calls is content."""
        inner = text.strip().removeprefix(self._start)
        for end in MARKERS.values():
            inner = inner.removesuffix(end)
        calls = parse_calls(inner.strip())
        if calls is None:
            self._add_content(text)
        for name, arguments in calls or ():
            self._start_call(name)
            self._add_arguments(arguments)

    def _end(self) -> None:
        if self._start or self._may_be_list:
            self._read_list(self._buffer)
            self._buffer = ""
        self._release_buffer()


def parse_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call, in lists or on lines; None if the text has anything else."""
    try:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # models write line breaks into strings as they are
            tree = ast.parse(_QUOTED.sub(lambda found: found[0].replace("\n", "\\n"), text))
        elements: list[ast.expr] = []
        for line in tree.body:
            value = line.value if isinstance(line, ast.Expr) else None
            if value is None:
                return None
            elements += value.elts if isinstance(value, ast.List) else [value]
        return [_read_call(element) for element in elements] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def parse_literal(text: str) -> Any:
    """The value of a Python literal, in which JSON's literals may stand too. Raises ValueError for another text."""
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        return _read_literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(text[:40]) from error


def _read_call(element: ast.expr) -> tuple[str, str]:
    """Raises ValueError if the element is no call with literal arguments by name."""
    if not isinstance(element, ast.Call) or element.args:
        raise ValueError(element)
    arguments = {}
    for keyword in element.keywords:
        if keyword.arg is None:
            raise ValueError(element)
        arguments[keyword.arg] = _read_literal(keyword.value)
    return ast.unparse(element.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _read_literal(value: ast.expr) -> Any:
    match value:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements):
            return [_read_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                _read_literal(key) if key is not None else _refuse(): _read_literal(one)
                for key, one in zip(keys, values, strict=True)
            }
        case _:
            return ast.literal_eval(value)


def _refuse() -> Any:
    raise ValueError("**")
