"""ReuseTable: the rate at which prefix blocks are requested again, learned from all requests.

Blocks requested together form a *cohort*. The *kind* of a cohort says how often its blocks have been requested. For
each kind and each band of ages the table counts how many blocks reached that age, and how many were requested again
within it. Evicted blocks count too, so eviction does not bias the counts. A block's reuse rate is the Gittins index,

    max over horizons h of  P(requested within h | age) / E(seconds held until requested or until h | age)

that is, the hits per second of keeping the block for the best horizon. The rate falls once the usual time of reuse has
passed, and is low for fresh blocks of a kind that is not reused soon.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

# Bands of ages: below 1 s, then doubling. The last band has no end: ages above about an hour are one band.
BANDS: Final = 13
_BAND_ENDS: Final = tuple(float(2**band) for band in range(BANDS))
# The pooled counts of all kinds weigh as much as this many blocks of the kind itself.
_PRIOR_BLOCKS: Final = 8.0
# When a kind has counted this many blocks, its counts are halved, so that the table follows a load that changes.
_MAX_COUNTED_BLOCKS: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Cohort:
    """`size` blocks of one kind, last requested at `since`. `band`: the band of their age at the last clock advance."""

    kind: int
    since: float
    size: int = 0
    band: int = 0


class ReuseTable:
    """`now` is in seconds and never moves back. `version` changes when the rates do."""

    def __init__(self, num_kinds: int) -> None:
        self.now = 0.0
        self.version = 0
        self._reached = [[0.0] * BANDS for _ in range(num_kinds)]  # blocks that reached each band, by kind
        self._reused = [[0.0] * BANDS for _ in range(num_kinds)]  # blocks requested again within each band
        self._rates = [[0.0] * BANDS for _ in range(num_kinds)]
        self._cohorts: list[deque[Cohort]] = [deque() for _ in range(BANDS)]  # by band, oldest first
        self._fitted_at = 0.0

    def create_cohort(self, kind: int) -> Cohort:
        """An empty cohort of age 0."""
        cohort = Cohort(kind, self.now)
        self._cohorts[0].append(cohort)
        return cohort

    def add_block(self, cohort: Cohort) -> None:
        cohort.size += 1
        self._reached[cohort.kind][cohort.band] += 1

    def record_reuse(self, cohort: Cohort) -> None:
        """Remove one block of the cohort, because it is requested again."""
        cohort.size -= 1
        self._reused[cohort.kind][cohort.band] += 1

    def forget_block(self, cohort: Cohort) -> None:
        """Remove one block of the cohort without counting whether it is requested again."""
        cohort.size -= 1

    def band_of(self, age: float) -> int:
        """The band of an age in seconds."""
        return 0 if age < 1 else min(int(age).bit_length(), BANDS - 1)

    def reuse_rate(self, kind: int, band: int) -> float:
        """Expected hits per second of keeping a block of this kind and age."""
        return self._rates[kind][band]

    def advance_clock(self, now: float) -> None:
        """Move cohorts to the bands of their new ages. Recompute the rates, at most once a second."""
        self.now = max(self.now, now)
        for band in range(BANDS - 1):
            cohorts = self._cohorts[band]
            while cohorts and self.now - cohorts[0].since >= _BAND_ENDS[band]:
                cohort = cohorts.popleft()
                if cohort.size:
                    cohort.band = band + 1
                    self._reached[cohort.kind][band + 1] += cohort.size
                    if band + 1 < BANDS - 1:
                        self._cohorts[band + 1].append(cohort)
        if self.now - self._fitted_at >= 1:
            self._fitted_at = self.now
            self._fit_rates()

    def _fit_rates(self) -> None:
        self.version += 1
        for kind, reached in enumerate(self._reached):
            if reached[0] > _MAX_COUNTED_BLOCKS:
                self._reached[kind] = [count / 2 for count in reached]
                self._reused[kind] = [count / 2 for count in self._reused[kind]]
        all_reached = [sum(column) for column in zip(*self._reached, strict=True)]
        all_reused = [sum(column) for column in zip(*self._reused, strict=True)]
        pooled = [used / max(reached, 1.0) for used, reached in zip(all_reused, all_reached, strict=True)]
        for kind, (reached, reused) in enumerate(zip(self._reached, self._reused, strict=True)):
            hazards = [
                (reused[band] + _PRIOR_BLOCKS * pooled[band]) / (reached[band] + _PRIOR_BLOCKS) for band in range(BANDS)
            ]
            self._rates[kind] = [_gittins_index(hazards, band) for band in range(BANDS)]


def _gittins_index(hazards: list[float], band: int) -> float:
    """The index at the start of `band`. `hazards[b]`: of the blocks that reach band b, the share that is requested
    again within it."""
    best = hits = seconds_held = 0.0
    remaining = 1.0
    for later in range(band, BANDS):
        seconds = _BAND_ENDS[later] - (_BAND_ENDS[later - 1] if later else 0.0)
        seconds_held += remaining * seconds * (1 - hazards[later] / 2)  # reuse comes halfway through a band
        hits += remaining * hazards[later]
        remaining *= 1 - hazards[later]
        best = max(best, hits / seconds_held)
    return best
