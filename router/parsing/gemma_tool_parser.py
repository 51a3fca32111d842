"""GemmaToolParser: Gemma 4's tool calls, whose strings are between markers in place of quotation marks.

    <|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:[1,2]}<tool_call|>

A call is parsed when its end marker has come, so all of its arguments are streamed at once.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from coatcheck.router.parsing.argument_values import json_argument
from coatcheck.router.parsing.tool_parser import MAX_HEADER, MarkedText, ToolParser

START: Final = "<|tool_call>"
END: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
RESPONSE: Final = "<|tool_response>"  # what some checkpoints write after a call, in place of the end of the turn
_NAME: Final = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,128})\s*")
_TOKEN: Final = re.compile(
    r'\s*(?:<\|"\|>(?P<string>.*?)<\|"\|>|(?P<sign>[{}\[\],:])|(?P<bare>[^{}\[\],:]+))', re.DOTALL
)


class GemmaToolParser(ToolParser):
    """`schemas`: by function, the schema of its parameters, for values that are not between markers."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._schemas = schemas
        self._marked = MarkedText((START, RESPONSE))
        self._is_call = False  # the buffer begins with START
        self._searched = 0  # characters in which the call's end was not found
        self._in_string = False  # where `_searched` ends

    def _advance(self) -> None:
        while self._read_call() if self._is_call else self._read_text():
            pass

    def _read_text(self) -> bool:
        marker = self._take_text(self._marked)
        if marker is None:
            return False
        if marker == RESPONSE:
            self._buffer, self._skips_space = self._buffer[len(RESPONSE) :], True
        else:
            self._is_call, self._searched, self._in_string = True, len(START), False
        return True

    def _read_call(self) -> bool:
        while True:
            markers = (QUOTE,) if self._in_string else (QUOTE, END)
            found = [(at, marker) for marker in markers if (at := self._buffer.find(marker, self._searched)) >= 0]
            if not found:
                self._searched = max(self._searched, len(self._buffer) - len(END) + 1)
                return False
            at, marker = min(found)
            self._searched = at + len(marker)
            if marker == END:
                break
            self._in_string = not self._in_string
        text, self._buffer = self._buffer[: self._searched], self._buffer[self._searched :]
        self._is_call = False
        if not self._add_call(text.removeprefix(START).removesuffix(END)):
            self._add_content(text)
        else:
            self._skips_space = True
        return True

    def _add_call(self, text: str) -> bool:
        """Adds the call between the markers; returns whether it is one."""
        name = _NAME.match(text, 0, MAX_HEADER)
        if name is None:
            return False
        try:
            arguments = _Reader(text[name.end() :], self._schemas.get(name[1], {})).read()
        except (ValueError, RecursionError):
            return False
        self._start_call(name[1])
        self._add_arguments(arguments)
        return True

    def _end(self) -> None:
        if self._is_call and self._add_call(self._buffer.removeprefix(START)):
            self._buffer = ""
        self._release_buffer()


class _Reader:
    """Reads the arguments of one call. `parameters`: the function's schema."""

    def __init__(self, text: str, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._tokens = [(found.lastgroup, found[found.lastgroup or 0]) for found in _TOKEN.finditer(text.strip())]
        self._at = 0

    def read(self) -> str:
        """The arguments as JSON text. Raises ValueError if the text is no object."""
        if self._take() != ("sign", "{"):
            raise ValueError("no object")
        made = self._read_object(is_root=True)
        if self._at < len(self._tokens):
            raise ValueError("text after the object")
        return made

    def _take(self) -> tuple[str | None, str]:
        if self._at >= len(self._tokens):
            raise ValueError("the text ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _read_object(self, *, is_root: bool) -> str:
        pairs = []
        while (token := self._take()) != ("sign", "}"):
            if token == ("sign", ","):
                continue
            kind, key = token
            if kind == "sign" or self._take() != ("sign", ":"):
                raise ValueError("no key")
            key = key if kind == "string" else key.strip()
            pairs.append(f"{_quote(key)}: {self._read_value(self._take(), key if is_root else None)}")
        return f"{{{', '.join(pairs)}}}"

    def _read_value(self, token: tuple[str | None, str], key: str | None) -> str:
        """`key`: of an argument; None in a list, or an object in an argument."""
        kind, text = token
        if kind == "string":
            return _quote(text)
        if token == ("sign", "{"):
            return self._read_object(is_root=False)
        if token == ("sign", "["):
            items = []
            while (token := self._take()) != ("sign", "]"):
                if token != ("sign", ","):
                    items.append(self._read_value(token, None))
            return f"[{', '.join(items)}]"
        if kind != "bare":
            raise ValueError("no value")
        text = text.strip()
        if key is not None:
            return json_argument(self._parameters, key, text)
        with suppress(ValueError):
            return json.dumps(json.loads(text), allow_nan=False)
        return _quote(text)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
