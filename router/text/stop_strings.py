"""StopStrings: ends a text before its first stop string, and holds back text that may be the beginning of one.

The first stop string is the one that is complete first. Of two that are complete at the same character, the longer one
counts. The text returned so far depends only on the text fed so far and not on how it was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """The filter of one text. `hit`: the stop string that ended the text, or None. `include`: keep it in the text."""

    __slots__ = ("_held", "_include", "_longest", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece of text; returns the text that can be shown now."""
        if self.hit is not None or not text:
            return ""
        buffer = self._held + text
        # The held text contains no whole stop string, so each match ends in the new text.
        ends = ((found + len(stop), -len(stop), stop) for stop in self._stops if (found := buffer.find(stop)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.hit = first
            self._held = ""
            return buffer[: end if self._include else end - len(self.hit)]
        kept = self._held_start(buffer)
        self._held = buffer[kept:]
        return buffer[:kept]

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _held_start(self, buffer: str) -> int:
        """Where the longest tail of `buffer` starts that may begin a stop string; len(buffer) if there is none."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
