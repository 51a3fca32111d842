"""OutlierDetection: which groups are too slow to be given work, though they answer, and for how long.

    slow = its steps take at least 5 times as long as usual, and 5 times as much above usual as its peers' do

Each group measures its own slowness over seconds of steps, against what such steps took it before (see `slowness` in
GroupStatus); so work that is merely large is not slow, nor is hardware that was always slower, which the cost of
routing knows, nor whatever slows all groups down alike. Compared is the lower median of the peers: there is always one
that is not slow. Who was put out is let in again after a pause, which doubles each time. Pure: it knows neither links
nor clocks.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import Final

from coatcheck.router.groups.group_failures import Ejected

_TIMES: Final = 5.0
_FIRST_PAUSE: Final = 30.0
_LONGEST_PAUSE: Final = 480.0
_FORGIVEN_SECONDS: Final = 3600.0  # after the last pause, the next one is a first one


class OutlierDetection:
    """`judge` each report of a group that has work."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # group -> how long the last one was, and when it began

    @staticmethod
    def is_far_beyond_usual(slowness: float) -> bool:
        """Whether it is worth a look at its peers."""
        return slowness >= _TIMES

    def detect(self, group: str, slowness: float, peers: Sequence[float], now: float) -> Ejected | None:
        """What it is to be ejected with, if it is. `peers`: the slowness of the others that could do its work."""
        if not peers:
            return None
        beside = max(median_low(peers), 1.0)
        if slowness < _TIMES * beside:
            return None
        last, began = self._pauses.get(group, (0.0, now))
        forgiven = now - began > last + _FORGIVEN_SECONDS
        pause = _FIRST_PAUSE if forgiven or not last else min(2 * last, _LONGEST_PAUSE)
        self._pauses[group] = (pause, now)
        return Ejected(
            f"its steps take {slowness:.1f} times as long as they used to, those of the groups beside it {beside:.1f} "
            f"times; it is let in again after {pause:g} s, or when no other serves",
            pause=pause,
        )
