"""RetryBudget: limits how many requests that have lost their group are sent again at once; the others wait.

Without a budget, groups that crash and return would make the other groups compute all streams again and again.
"""

import time
from collections.abc import Callable
from typing import Final

_RETRIES_PER_REQUEST: Final = 2.0
_FILL_SECONDS: Final = 10.0  # time in which an empty bucket fills
_MIN_SIZE: Final = 20.0  # retries of a router without open requests


class RetryBudget:
    """A token bucket of 20 retries, and two more for each open request, that fills in ten seconds.

    So each stream may lose its group twice and is sent again at once, even if all groups are lost together. Further
    retries are spread over time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open = 0
        self._level = _MIN_SIZE
        self._updated_at = clock()  # when `_level` was last computed
        self.spent = 0
        self.delayed = 0

    def open_request(self) -> None:
        """Adds the two retries of a request that has begun."""
        self._open += 1
        self._level += _RETRIES_PER_REQUEST

    def close_request(self) -> None:
        """Shrinks the bucket for a request that has ended. The debt becomes at most one retry per open request, so that
        no request waits because of ended ones."""
        left, self._updated_at = self.left, self._clock()
        self._open -= 1
        self._level = min(max(left, -float(self._open)), self._size)

    def spend_retry(self) -> float:
        """Spends one retry. Returns the seconds to wait before the retry: usually 0, at most 10."""
        self._level, self._updated_at = self.left - 1, self._clock()
        self.spent += 1
        if self._level >= 0:
            return 0.0
        self.delayed += 1
        return -self._level / self._size * _FILL_SECONDS

    @property
    def left(self) -> float:
        """Retries that are left now; -n if n requests wait for a retry."""
        earned = (self._clock() - self._updated_at) / _FILL_SECONDS * self._size
        return min(self._size, self._level + earned)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._open >= 0, "more requests have ended than have begun"
        assert self._level <= self._size, "more is left than there may be"

    @property
    def _size(self) -> float:
        return _MIN_SIZE + _RETRIES_PER_REQUEST * self._open
