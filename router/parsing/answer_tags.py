"""AnswerTags: removes the tags that some models write around their answer, such as <response> and </response>.

ChannelMarkers: removes the markers of models that write each part of an answer into a channel of its own.
"""

from collections.abc import Sequence
from typing import Final

from coatcheck.router.parsing.tool_parser import MAX_HEADER, MarkedText

# (start, end) as Cohere's Command A, Granite 3.3 and ERNIE 4.5, and Hunyuan-A13B write them. Apriel's answer begins at
# the end of the reasoning, without a start tag.
TAGS: Final = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("", "[END FINAL RESPONSE]"),
)


class AnswerTags:
    """The tags of one choice. If the answer begins with `start`, both tags are removed, with the white space on their
    inner sides. Other text stays as it is."""

    def __init__(self, start: str, end: str) -> None:
        self._start = start
        self._end = end
        self._buffer = ""
        self._is_decided = False  # whether the answer begins with `start`
        self._skips_space = False  # after `start`
        self._is_open = False  # between the tags

    def feed(self, text: str) -> str:
        """Takes the next piece of the answer; returns what is certain now."""
        if self._is_decided and not self._is_open:
            return text
        self._buffer += text
        if not self._is_decided:
            begun = self._buffer.lstrip()
            if self._start.startswith(begun) and begun != self._start and len(self._buffer) <= MAX_HEADER:
                return ""
            self._is_decided = True
            self._is_open = self._skips_space = begun.startswith(self._start)
            if self._is_open:
                self._buffer = begun.removeprefix(self._start)
        if not self._is_open:
            return self.finish()
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        at = self._buffer.find(self._end)
        if at >= 0:
            self._is_open = False
            text, self._buffer = self._buffer[:at].rstrip() + self._buffer[at + len(self._end) :], ""
            return text
        return self._take_certain()

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._buffer = self._buffer, ""
        return text

    def _take_certain(self) -> str:
        """Takes the text that cannot belong to the end tag, or to the white space before it, out of the buffer."""
        count = len(self._buffer)
        for place in range(max(0, count - len(self._end) + 1), count):
            if self._end.startswith(self._buffer[place:]):
                count = place
                break
        count = max(len(self._buffer[:count].rstrip()), count - MAX_HEADER)
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text


class ChannelMarkers:
    """The markers of one choice. They are removed wherever they are in the answer; other text stays as it is."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._marked = MarkedText(markers)
        self._buffer = ""

    def feed(self, text: str) -> str:
        """Takes the next piece of the answer; returns what is certain now."""
        self._buffer += text
        certain = ""
        while (found := self._marked.find(self._buffer)) is not None:
            at, marker = found
            certain += self._buffer[:at]
            self._buffer = self._buffer[at + len(marker) :]
        count = self._marked.count_certain(self._buffer)
        certain, self._buffer = certain + self._buffer[:count], self._buffer[count:]
        return certain

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._buffer = self._buffer, ""
        return text
