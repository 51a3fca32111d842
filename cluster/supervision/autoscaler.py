"""Autoscaler: looks at the queue once a second, asks Ray for room, and adds or ends a group. See autoscale.py for when.

Ray's own autoscaler, where there is one, brings nodes; where there is none, only what is free already can be taken. It
knows neither Ray nor groups but by the four things that it is given.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.rank_placement import NoRoom
from coatcheck.cluster.supervision.autoscale_rule import AutoscaleRule, QueueSample
from coatcheck.proto.errors import CoatcheckError

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 15.0  # after what takes time to fail: a group that did not start, say
_DRAIN_SECONDS = 300.0

_log = logging.getLogger(__name__)


class Autoscaler:
    """`pressure`: how long requests wait, and how many groups are busy; `size`: groups now; `ask_room`: tells Ray how
    many groups there should be room for, those that run included, or 0 when they have all the room that is wanted;
    `scale`: to so many, with so long for what runs."""

    def __init__(
        self,
        rule: AutoscaleRule,
        *,
        pressure: Callable[[], Awaitable[tuple[float, int]]],
        size: Callable[[], int],
        ask_room: Callable[[int], None],
        scale: Callable[[int, float], Awaitable[None]],
    ) -> None:
        self._rule = rule
        self._pressure = pressure
        self._size = size
        self._ask_room = ask_room
        self._scale = scale
        self._samples: deque[QueueSample] = deque()
        self._seen = 0  # groups at the last look
        self._asked = -1  # the last word to `ask_room`; before this one a supervisor that is gone may have had it
        self._said = 0  # the number that was last said to be wanted, until there are as many
        self._not_before = -math.inf

    async def keep(self) -> None:
        """Until cancelled; what goes wrong here keeps no group from being kept up."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look(time.monotonic())
            except Exception:  # Ray's head may be gone for a while
                _log.exception("the number of groups could not be changed")
                self._not_before = time.monotonic() + _RETRY_SECONDS

    async def look(self, now: float) -> None:
        """Once: sees how it is, and does what is to be done."""
        (queue_seconds, busy), groups = await self._pressure(), self._size()
        if groups != self._seen:
            self._samples.clear()
            self._seen = groups
        self._samples.append(QueueSample(now, queue_seconds, busy))
        longest = max(self._rule.grow_hold_seconds, self._rule.shrink_hold_seconds)
        # One that is as old stays, however long ago the look was: it says how that time began.
        while len(self._samples) > 1 and self._samples[1].time <= now - longest:
            self._samples.popleft()
        wished = self._rule.wished(self._samples, groups, now)
        # What groups hold is in use. To ask for that too would keep a node that has none: it could serve as well.
        room = wished if wished > groups else 0
        if room != self._asked:
            await asyncio.to_thread(self._ask_room, room)
            self._asked = room
        if wished == groups:
            self._said = 0
        if wished == groups or now < self._not_before:
            return
        is_new, self._said = wished != self._said, wished
        if is_new:
            _log.info("requests wait %.1f s: %s, and %d wanted", queue_seconds, counted(groups, "group"), wished)
        try:
            await self._scale(wished, _DRAIN_SECONDS)
        except NoRoom as error:
            # Found out by asking Ray what is free. A node may be on its way: the next look asks again.
            if is_new:
                _log.warning("still %s: %s", counted(groups, "group"), error)
        except CoatcheckError as error:
            _log.warning("still %s: %s", counted(groups, "group"), error)
            self._not_before = now + _RETRY_SECONDS
