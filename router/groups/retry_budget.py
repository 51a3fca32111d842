"""RetryBudget: how many requests that have lost their group are sent again at once; the others wait a little.

Without it, groups that come and go would make the others compute all streams again and again.
"""

import time
from collections.abc import Callable
from typing import Final

_EACH: Final = 2.0  # retries for each open request
_SECONDS: Final = 10.0  # in which an empty bucket fills
_LEAST: Final = 20.0  # retries of a router without requests


class RetryBudget:
    """A token bucket: it holds two retries for each open request, and fills in ten seconds.

    So all streams of all groups may be lost at once, and then once more, and each is sent again at once. Further
    retries are spread over time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open = 0
        self._level = _LEAST
        self._filled = clock()
        self.spent = 0
        self.delayed = 0

    def open_request(self) -> None:
        """A request has begun; it adds two retries to the bucket."""
        self._open += 1
        self._level += _EACH

    def close_request(self) -> None:
        """A request has ended; its retries leave the bucket. If it waited for a retry, no other waits for it."""
        left, self._filled = self.left, self._clock()
        self._open -= 1
        self._level = min(max(left, -float(self._open)), self._size)

    def spend_retry(self) -> float:
        """Spends one retry. Returns the seconds to wait before it: mostly 0, at most 10."""
        self._level, self._filled = self.left - 1, self._clock()
        self.spent += 1
        if self._level >= 0:
            return 0.0
        self.delayed += 1
        return -self._level / self._size * _SECONDS

    @property
    def left(self) -> float:
        """Retries that are left now; below 0, that many wait."""
        earned = (self._clock() - self._filled) / _SECONDS * self._size
        return min(self._size, self._level + earned)

    @property
    def _size(self) -> float:
        return _LEAST + _EACH * self._open

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._open >= 0, "more requests have ended than have begun"
        assert self._level <= self._size, "more is left than there may be"
