"""FileWatcher: whether files have changed since they were read last. It does not know what is in them."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

_LOOK_SECONDS: Final = 1.0


class FileWatcher:
    """`changed()` looks at most once a second, so that it may be asked for every request."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._looked = clock()
        self._seen = self._look()

    def look_now(self) -> None:
        """The next `changed` looks, however soon it is asked."""
        self._looked = -math.inf

    def changed(self) -> bool:
        """Whether any is another than at the last look; a change is told once."""
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # of what a link leads to: a mounted secret is replaced by turning a link
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
