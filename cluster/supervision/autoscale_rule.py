"""Autoscale: how many groups there should be, from how long requests have waited lately. Pure; see autoscaler.py."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueSample:
    """What was seen at a moment: how long requests waited then, and in how many groups something ran."""

    time: float
    queue_seconds: float
    busy_groups: int


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """Between `least` and `most` groups; a group comes soon, and goes late, since it takes its cache with it."""

    least: int
    most: int
    target_seconds: float
    grow_hold_seconds: float = 10.0
    shrink_hold_seconds: float = 600.0

    def wished(self, samples: Sequence[QueueSample], groups: int, now: float) -> int:
        """One more than `groups` after the queue was above target all the time that it takes, one less after nobody
        waited and some group had nothing to do for that long; else as many. `samples`, in order, begin at the last
        change. An operator who wants more than `most` or fewer than `least` is not contradicted."""
        if groups < self.most and _throughout(
            samples, now, self.grow_hold_seconds, [one.queue_seconds > self.target_seconds for one in samples]
        ):
            return groups + 1
        if groups > self.least and _throughout(
            samples,
            now,
            self.shrink_hold_seconds,
            [one.queue_seconds == 0.0 and one.busy_groups < groups for one in samples],
        ):
            return groups - 1
        return groups


def _throughout(samples: Sequence[QueueSample], now: float, hold: float, holds: Sequence[bool]) -> bool:
    """Whether it held all that time: in the last sample from before it, which says how it began, and in each since."""
    before = sum(1 for sample in samples if sample.time <= now - hold)
    return before > 0 and all(holds[before - 1 :])
