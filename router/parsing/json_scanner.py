"""JsonScanner: finds the end of a JSON object or list in a text that comes in pieces."""

import re
from typing import Final

_OUTSIDE: Final = re.compile(r'["{}\[\]<]')
_INSIDE: Final = re.compile(r'["\\]')


class JsonScanner:
    """`depth`: how many objects and lists are open before the first piece. Checks no syntax but brackets and quotes. A
    "<" outside of a string also ends the value: it begins a marker, before which a model has left out brackets."""

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
