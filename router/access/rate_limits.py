"""RateLimit: how much of something a tenant may have a minute, as a bucket that fills steadily and holds a minute's.

What is had may be known only afterwards, so a bucket may go below zero: then nothing more is given until it is full
enough again. Pure but for the times that it is told. It does not know requests.
"""

from typing import Final

_MINUTE: Final = 60.0


class RateLimit:
    """Full at first."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = self._most
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until something may be had; 0 when it may now."""
        self._fill(now)
        return max(1.0 - self._level, 0.0) * _MINUTE / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """So much is had, or given back."""
        self._fill(now)
        self._level = min(self._level - amount, self._most)

    @property
    def _most(self) -> float:
        return max(self.per_minute, 1.0)  # a limit below one a minute still gives one at a time

    def _fill(self, now: float) -> None:
        self._level = min(self._level + max(now - self._at, 0.0) * self.per_minute / _MINUTE, self._most)
        self._at = max(self._at, now)
