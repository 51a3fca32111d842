"""ReuseTable: how soon prefix blocks are wanted again, learned from all that are, and what keeping one is worth.

An actuary's table. Blocks that a request wants begin a life together, as a *cohort*; a life ends when the block is
wanted again. For each kind of cohort and each band of ages the table counts how many lives came to that age and how
many ended there, whether the block was still held or not, so that what eviction does cannot bias what it learns. A
block's rate is

    max over horizons h of  P(wanted within h | age) / E(seconds held until then or until h | age)

hits per second of keeping it, if it is kept as long as that pays and no longer (Gittins' index). It falls for blocks
whose time has passed, and is low for fresh ones that nobody wants back soon. It does not know tiers or blocks.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

# Bands of ages: below 1 s, then doubling; the last one is open (from about an hour on nothing is told apart).
BANDS: Final = 13
_ENDS: Final = tuple(float(2**band) for band in range(BANDS))
# A kind's counts lean on all kinds' until it has about so many lives of its own in a band.
_PRIOR_LIVES: Final = 8.0
# Beyond so many lives in a kind its counts are halved: it forgets, and follows a load that changes.
_MOST_LIVES: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Cohort:
    """`size` blocks of one kind, last wanted at `since` and not again yet; `band` is their age's, as last seen."""

    kind: int
    since: float
    size: int = 0
    band: int = 0


class ReuseTable:
    """`now` only moves forward, by `advance`; `version` changes when rates do."""

    def __init__(self, kinds: int) -> None:
        self.now = 0.0
        self.version = 0
        self._came = [[0.0] * BANDS for _ in range(kinds)]
        self._ended = [[0.0] * BANDS for _ in range(kinds)]
        self._rates = [[0.0] * BANDS for _ in range(kinds)]
        self._living: list[deque[Cohort]] = [deque() for _ in range(BANDS)]  # by band, in the order of `since`
        self._fitted_at = 0.0

    def begin(self, kind: int) -> Cohort:
        """A new cohort, of nobody yet."""
        cohort = Cohort(kind, self.now)
        self._living[0].append(cohort)
        return cohort

    def join(self, cohort: Cohort, count: int = 1) -> None:
        """Blocks begin their lives in it."""
        cohort.size += count
        self._came[cohort.kind][cohort.band] += count

    def end(self, cohort: Cohort) -> None:
        """One of its blocks is wanted again."""
        cohort.size -= 1
        self._ended[cohort.kind][cohort.band] += 1

    def leave(self, cohort: Cohort) -> None:
        """One of its blocks is forgotten: how long it would have lived is not known."""
        cohort.size -= 1

    def band(self, age: float) -> int:
        """The band of an age in seconds."""
        return 0 if age < 1 else min(int(age).bit_length(), BANDS - 1)

    def rate(self, kind: int, band: int) -> float:
        """Hits a second that a block of this kind and age brings while it is kept."""
        return self._rates[kind][band]

    def advance(self, now: float) -> None:
        """Time has passed: cohorts grow older, and once a second the rates are made anew."""
        self.now = max(self.now, now)
        for band in range(BANDS - 1):
            cohorts = self._living[band]
            while cohorts and self.now - cohorts[0].since >= _ENDS[band]:
                cohort = cohorts.popleft()
                if cohort.size:
                    cohort.band = band + 1
                    self._came[cohort.kind][band + 1] += cohort.size
                    if band + 1 < BANDS - 1:
                        self._living[band + 1].append(cohort)
        if self.now - self._fitted_at >= 1:
            self._fitted_at = self.now
            self._fit()

    def _fit(self) -> None:
        self.version += 1
        for kind, (came, ended) in enumerate(zip(self._came, self._ended, strict=True)):
            if came[0] > _MOST_LIVES:
                self._came[kind] = [count / 2 for count in came]
                self._ended[kind] = [count / 2 for count in ended]
        all_came = [sum(column) for column in zip(*self._came, strict=True)]
        all_ended = [sum(column) for column in zip(*self._ended, strict=True)]
        for kind, (came, ended) in enumerate(zip(self._came, self._ended, strict=True)):
            risks = []
            for band in range(BANDS):
                mean = all_ended[band] / max(all_came[band], 1.0)
                risks.append((ended[band] + _PRIOR_LIVES * mean) / (came[band] + _PRIOR_LIVES))
            self._rates[kind] = [_best_rate(risks, band) for band in range(BANDS)]


def _best_rate(risks: list[float], band: int) -> float:
    """Gittins' index at the beginning of a band; `risks[b]`: how many of those that come to band b end in it."""
    best = wanted = held = 0.0
    alive = 1.0
    for later in range(band, BANDS):
        seconds = _ENDS[later] - (_ENDS[later - 1] if later else 0.0)
        held += alive * seconds * (1 - risks[later] / 2)  # those that end do so halfway through
        wanted += alive * risks[later]
        alive *= 1 - risks[later]
        best = max(best, wanted / held)
    return best
