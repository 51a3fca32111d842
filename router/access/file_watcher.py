"""FileWatcher: whether files have changed since the last check."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

_CHECK_SECONDS: Final = 1.0


class FileWatcher:
    """Checks the files at most once a second, so that `has_changed` may be called for every request."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._checked_at = clock()
        self._seen = [_state(path) for path in self._paths]

    def has_changed(self) -> bool:
        """True once for each change of any file."""
        if self._clock() - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = self._clock()
        before, self._seen = self._seen, [_state(path) for path in self._paths]
        return before != self._seen


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # follows links: a mounted secret is replaced by changing its link
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
