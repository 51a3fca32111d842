"""OutlierDetection: which groups are ejected because they are slow, and for how long.

    A group is slow if its steps take at least 5 times as long as its own usual steps, and the factor is at least
    5 times that of its peers.

Each group measures this factor over seconds of steps (`slowness` in GroupStatus). So large requests do not make a group
slow, nor does hardware that was always slower (routing costs cover that), nor a cause that slows all groups alike. The
factor of the peers is their lower median, so at least one group never counts as slow. An ejected group may attach again
after a pause, which doubles each time. Pure.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import Final

from coatcheck.router.groups.group_failures import GroupEjected

_SLOW_FACTOR: Final = 5.0
_FIRST_PAUSE: Final = 30.0  # seconds
_LONGEST_PAUSE: Final = 480.0
_FORGET_SECONDS: Final = 3600.0  # after the end of a pause; the next one then begins with _FIRST_PAUSE again


class OutlierDetection:
    """Call `detect` for each load report of a group that runs requests."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}  # group -> length and beginning of its last pause

    @staticmethod
    def is_far_beyond_usual(slowness: float) -> bool:
        """Whether the group is slow compared with its own past. Cheap; call it before `detect`."""
        return slowness >= _SLOW_FACTOR

    def detect(self, group: str, slowness: float, peers: Sequence[float], now: float) -> GroupEjected | None:
        """A GroupEjected if the group is slow, else None. `peers`: slowness of the other groups that compute the same
        tokens. `now`: seconds."""
        if not peers:
            return None
        peer_slowness = max(median_low(peers), 1.0)
        if slowness < _SLOW_FACTOR * peer_slowness:
            return None
        last, began = self._pauses.get(group, (0.0, now))
        is_forgotten = now - began > last + _FORGET_SECONDS
        pause = _FIRST_PAUSE if is_forgotten or not last else min(2 * last, _LONGEST_PAUSE)
        self._pauses[group] = (pause, now)
        return GroupEjected(
            f"its steps take {slowness:.1f} times as long as they used to, those of the groups beside it "
            f"{peer_slowness:.1f} times; it may attach again after {pause:g} s, or when no other group serves",
            pause=pause,
        )
