"""Deadlines: which requests are not to begin any more, since whoever asked has given up.

Looked at only when some deadline passes: a step that drops nobody costs one comparison. It does not know blocks.
"""

import math
from collections.abc import Iterable

from coatcheck.workers.core.sequence import Sequence


class Deadlines:
    """`note` each sequence that waits; `overdue` before each step."""

    def __init__(self) -> None:
        self._next = math.inf  # no deadline of those that wait is sooner

    def note(self, sequence: Sequence) -> None:
        """It waits from now on."""
        self._next = min(self._next, sequence.deadline)

    def overdue(self, waiting: Iterable[Sequence], now: float) -> list[str]:
        """Requests, by id, that have not begun by their deadline; what has begun is for its router to end."""
        if now < self._next:
            return []
        unbegun = [one for one in waiting if one.leader is None and not one.started_at and not one.num_preemptions]
        self._next = min((one.deadline for one in unbegun if one.deadline > now), default=math.inf)
        return [one.request.request_id for one in unbegun if one.deadline <= now]
