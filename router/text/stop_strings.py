"""StopStrings: ends a text before the first stop string, and never lets out what might be the start of one.

The first is the one that is complete first; of two complete at the same character, the longer. What has been let out
depends on the text fed so far and not on how it was cut into pieces. It does not know tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """A filter over one text. `hit` is the stop string that ended it; with `include` it is the end of the text."""

    __slots__ = ("_held", "_include", "_longest", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece of text and returns what may be shown of it and of what was held back."""
        if self.hit is not None or not text:
            return ""
        buffer = self._held + text
        # What was held holds no whole stop string, so a match ends in the new text; `find` gives each one's first.
        ends = ((found + len(stop), -len(stop), stop) for stop in self._stops if (found := buffer.find(stop)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.hit = first
            self._held = ""
            return buffer[: end if self._include else end - len(self.hit)]
        kept = self._start_of_a_stop(buffer)
        self._held = buffer[kept:]
        return buffer[:kept]

    def flush(self) -> str:
        """The text has ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _start_of_a_stop(self, buffer: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string; the buffer's length if none is."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
