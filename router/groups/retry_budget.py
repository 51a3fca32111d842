"""RetryBudget: how many requests that have lost their group this router sends again at once; the others wait a little.

Without it groups that come and go would have everything computed again and again, and the more is lost, the more is
computed. It does not know what is sent, nor why.
"""

import time
from collections.abc import Callable
from typing import Final

_EACH: Final = 2.0  # retries that there is room for, for each open request
_SECONDS: Final = 10.0  # in which what was spent comes back
_LEAST: Final = 20.0  # for a router with little to do


class RetryBudget:
    """A bucket that holds two retries for each open request, and fills in ten seconds.

    So all streams of all groups may be lost at once, and again before any is answered, and each is sent on at once.
    More than that is spread over time: a retry beyond the budget waits for its turn.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open = 0
        self._level = _LEAST
        self._filled = clock()
        self.spent = 0
        self.delayed = 0

    def open_request(self) -> None:
        """A request has begun, and brings its share."""
        self._open += 1
        self._level += _EACH

    def close_request(self) -> None:
        """It is over, and what is left of its share is gone. If it waited, nobody waits behind it any more."""
        left, self._filled = self.left, self._clock()
        self._open -= 1
        self._level = min(max(left, -float(self._open)), self._size)

    def spend_retry(self) -> float:
        """Spends one retry; returns in how many seconds it may be sent: mostly 0, and never more than ten."""
        self._level, self._filled = self.left - 1, self._clock()
        self.spent += 1
        if self._level >= 0:
            return 0.0
        self.delayed += 1
        return -self._level / self._size * _SECONDS

    @property
    def left(self) -> float:
        """Retries that would be sent at once now; below 0: as many wait."""
        earned = (self._clock() - self._filled) / _SECONDS * self._size
        return min(self._size, self._level + earned)

    @property
    def _size(self) -> float:
        return _LEAST + _EACH * self._open

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._open >= 0, "more requests have ended than have begun"
        assert self._level <= self._size, "more is left than there may be"
