"""ToolParser: the base of the parsers that find tool calls in the text of a choice while it is generated."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from coatcheck.router.parsing.parts import Content, Part, ToolCallDelta, join_parts, make_call_id

# Max characters between the beginning of a call and its arguments, and max white space that is held back. Each new
# piece of text is searched together with the text held back: without a limit this takes quadratic time.
MAX_HEADER: Final = 512


class ToolParser(ABC):
    """The parser of one choice. `max_calls`: further calls are dropped. Text that begins like a call but turns out not
    to be one is content."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._buffer = ""
        self._parts: list[Part] = []
        self._count = 0  # calls that have begun, with those that are dropped
        self._is_cut = False
        self._skips_space = False  # white space at the beginning of the buffer is no content

    @property
    def has_complete_calls(self) -> bool:
        """Whether there is a call, and none was cut."""
        return self._count > 0 and not self._is_cut

    def feed(self, text: str) -> list[Part]:
        """Takes the next piece of text; returns the content and the pieces of calls that are certain now."""
        self._buffer += text
        self._advance()
        return self._take_parts()

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        self._end()
        return self._take_parts()

    @abstractmethod
    def _advance(self) -> None:
        """Moves what is certain from `_buffer` to the parts."""

    @abstractmethod
    def _end(self) -> None:
        """Moves the rest of `_buffer` to the parts."""

    def _start_call(self, name: str, call_id: str = "") -> None:
        self._count += 1
        if self._is_wanted:
            self._parts.append(ToolCallDelta(self._count - 1, "", name, call_id or make_call_id()))

    def _add_arguments(self, text: str) -> None:
        if text and self._is_wanted:
            self._parts.append(ToolCallDelta(self._count - 1, text))

    def _add_content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _take_text(self, markers: "MarkedText") -> str | None:
        """Moves the text before the next marker to the parts; see `_skips_space`. Returns the marker, with which the
        buffer then begins, or None if there is none: then the text that cannot begin one is moved."""
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        found = markers.find(self._buffer)
        if found is None:
            count = markers.count_certain(self._buffer)
            self._add_content(self._buffer[:count])
            self._buffer = self._buffer[count:]
            return None
        at, marker = found
        self._add_content(self._buffer[:at].rstrip("\n"))
        self._buffer = self._buffer[at:]
        return marker

    def _release_buffer(self) -> None:
        """Makes the whole buffer content."""
        self._add_content(self._buffer)
        self._buffer = ""

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._count <= self._max_calls

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return join_parts(parts)


class MarkedText:
    """Splits text at markers. Holds back the end of a text that may begin a marker, with the newlines before it."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._longest = max(map(len, self._markers), default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """(index, marker) of the first marker in the text; of two at one index, the longer."""
        found = [(at, -len(marker), marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if not found:
            return None
        at, _, marker = min(found)
        return at, marker

    def count_certain(self, text: str) -> int:
        """How many characters of a text without a marker can be shown now."""
        end = len(text)
        for start in range(max(0, end - self._longest + 1), end):
            if any(marker.startswith(text[start:]) for marker in self._markers):
                end = start
                break
        return max(len(text[:end].rstrip("\n")), end - MAX_HEADER)
