"""PythonicToolParser: tool calls that are a list of Python calls, such as [weather(city="Bonn")].

A list is parsed when its last bracket has come, so all of its calls are streamed at once.
"""

import ast
import json
import re
from typing import Any, Final

from coatcheck.router.parsing.tool_parser import ToolParser

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_LIST: Final = re.compile(r"\[\s*[A-Za-z_][\w.-]*\s*\(")
_LIST_BEGUN: Final = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*)?")
_NAMES: Final = {"true": True, "false": False, "null": None}
_MAX_CHARACTERS: Final = 1 << 16  # of a list; Python's parser takes 0.1 s for this many


class PythonicToolParser(ToolParser):
    """A list of calls must be the beginning of the text; other text is content."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._is_content = False

    def _advance(self) -> None:
        if not self._is_content:
            text = self._buffer.lstrip()
            if text.startswith(START):
                self._buffer = text = text[len(START) :].lstrip()
            can_begin = START.startswith(text) or _LIST_BEGUN.fullmatch(text) or _LIST.match(text)
            self._is_content = not can_begin or len(text) > _MAX_CHARACTERS
        if self._is_content:
            self._release_buffer()

    def _end(self) -> None:
        text = self._buffer.strip().removesuffix(END).rstrip()
        calls = None if self._is_content else parse_calls(text)
        if calls is None:
            self._release_buffer()
        for name, arguments in calls or ():
            self._start_call(name)
            self._add_arguments(arguments)
        self._buffer = ""


def parse_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of each call; None if the text is no list of calls."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_read_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


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
