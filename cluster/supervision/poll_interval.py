"""PollInterval: how often the supervisor calls each actor of a kind to see whether it still answers.

A call costs the supervisor 0.35 to 0.8 ms of CPU (bench/LOG.md). Ray reports by itself that a process has ended; the
calls find only the actors that hang. The more actors there are, the less often each is called, so the supervisor
stays idle.
"""

import random

_CALLS_PER_SECOND = 30  # to all actors of one kind


class PollInterval:
    """`shortest_seconds`: the interval while there are few actors."""

    def __init__(self, shortest_seconds: float) -> None:
        self.actors = 0  # the number of actors that are called
        self._shortest_seconds = shortest_seconds

    def next_wait(self) -> float:
        """Seconds until the next call of one actor, with 25% jitter so that the calls of many actors are spread out."""
        return max(self._shortest_seconds, self.actors / _CALLS_PER_SECOND) * random.uniform(0.75, 1.25)
