"""Autoscaler: measures once a second how long requests queue, and adds or removes one group if AutoscaleRule says so.

If the Ray cluster has an autoscaler, that autoscaler starts nodes for new groups. Otherwise groups are added only while
running nodes have free resources.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources
from coatcheck.proto.errors import CoatcheckError

_SAMPLE_SECONDS = 1.0
_RETRY_SECONDS = 15.0  # after a failed change of the number of groups, unless only resources were missing
_DRAIN_SECONDS = 300.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One measurement: `queue_seconds` is how long requests waited, `busy_groups` how many groups had requests."""

    time: float
    queue_seconds: float
    busy_groups: int


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """Keeps the number of groups between `min_groups` and `max_groups`.

    Adding is fast and removing is slow, because a group that is removed loses its cached prefixes.
    """

    min_groups: int
    max_groups: int
    target_seconds: float
    grow_hold_seconds: float = 10.0
    shrink_hold_seconds: float = 600.0

    def choose_size(self, samples: Sequence[QueueSample], groups: int, now: float) -> int:
        """The number of groups to have: `groups`, one more, or one fewer.

        One more if requests waited longer than the target during all of the last `grow_hold_seconds`. One fewer if,
        during all of the last `shrink_hold_seconds`, no request waited and some group was idle. `samples`: in order of
        time, from after the last change of the number of groups. A number outside the bounds, which an operator has
        set, is not forced back: the bounds only limit the two steps.
        """
        is_queueing = [sample.queue_seconds > self.target_seconds for sample in samples]
        if groups < self.max_groups and _holds_since(now - self.grow_hold_seconds, samples, is_queueing):
            return groups + 1
        is_idle = [sample.queue_seconds == 0.0 and sample.busy_groups < groups for sample in samples]
        if groups > self.min_groups and _holds_since(now - self.shrink_hold_seconds, samples, is_idle):
            return groups - 1
        return groups


def _holds_since(start: float, samples: Sequence[QueueSample], holds: Sequence[bool]) -> bool:
    """Whether a condition has held since `start`. `holds`: its value for each sample.

    The last sample at or before `start` counts too. Without such a sample the result is False.
    """
    before = sum(1 for sample in samples if sample.time <= start)
    return before > 0 and all(holds[before - 1 :])


class Autoscaler:
    """Applies an AutoscaleRule to a running cluster, through five functions. Without a rule it changes nothing.

    `measure_queue` returns (seconds that requests wait, number of busy groups). `count_groups` returns the number of
    groups now. `restarts_wait` returns whether groups wait for a restart; to restart a group needs a second one.
    `request_room(groups)` asks Ray's autoscaler for nodes for `groups` groups in all; 0 withdraws the request.
    `scale_groups(before, groups, drain_seconds)` changes the number of groups from `before` to `groups`, and does
    nothing if another command has changed it meanwhile. A call that removes a group first waits for a restart that
    runs; the autoscaler cancels the call if the group has work meanwhile. Then the call drains the group for up to
    300 s. The autoscaler may call `scale_groups` again during that time, to add a group; then the group that drains
    must stay.
    """

    def __init__(
        self,
        rule: AutoscaleRule | None,
        *,
        measure_queue: Callable[[], Awaitable[tuple[float, int]]],
        count_groups: Callable[[], int],
        restarts_wait: Callable[[], bool],
        request_room: Callable[[int], None],
        scale_groups: Callable[[int, int, float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule = rule
        self._measure_queue = measure_queue
        self._count_groups = count_groups
        self._restarts_wait = restarts_wait
        self._request_room = request_room
        self._scale_groups = scale_groups
        self._clock = clock
        self._samples: deque[QueueSample] = deque()
        self._last_count = 0  # of groups, at the last sample
        self._last_request = -1  # last argument of `request_room`; -1: unknown, a former supervisor may have called it
        self._logged_size = 0  # the last size that was logged as wanted; 0 once the cluster has it
        self._not_before = -math.inf
        self._removal: asyncio.Task[None] | None = None  # the removal of a group, which goes on between samples
        # The number of groups when `_removal` began. 0 once the number has changed: then the removal drains its group.
        self._removal_from = 0

    def set_rule(self, rule: AutoscaleRule | None) -> None:
        """Use another rule from the next sample on. A group that is being added or removed stays so: to start one may
        take minutes."""
        self._rule = rule

    async def run_forever(self) -> None:
        """Evaluate the rule once a second until cancelled. After an error, wait 15 s before the next change."""
        try:
            while True:
                await asyncio.sleep(_SAMPLE_SECONDS)
                try:
                    await self.evaluate_rule(self._clock())
                except Exception:  # Ray's head may be gone for a while
                    _log.exception("the number of groups could not be changed")
                    self._not_before = self._clock() + _RETRY_SECONDS
        finally:
            if self._removal is not None:
                self._removal.cancel()

    async def evaluate_rule(self, now: float) -> None:
        """Take one sample, and add or remove a group if the rule says so. Returns once a new group serves, but does not
        wait for the end of a removal."""
        if self._removal is not None and self._removal.done():
            removal, self._removal = self._removal, None
            if not removal.cancelled():
                removal.result()  # raises its unexpected error, if any
        rule = self._rule
        if rule is None:
            self._samples.clear()
            if self._last_request > 0:
                await self._request_nodes(0, 0)
            return
        groups = await self._add_sample(now, max(rule.grow_hold_seconds, rule.shrink_hold_seconds))
        wanted = rule.choose_size(self._samples, groups, now)
        if wanted == 1 < groups and self._restarts_wait():
            wanted = groups  # no group could be restarted any more
        if groups != self._removal_from:
            self._removal_from = 0
        elif wanted >= groups and self._removal is not None:
            self._removal.cancel()  # it waits for a restart, and its group has work meanwhile
        await self._request_nodes(wanted, groups)
        if wanted == groups:
            self._logged_size = 0
            return
        if now < self._not_before:
            return
        is_new, self._logged_size = wanted != self._logged_size, wanted
        if is_new:
            queue_seconds = self._samples[-1].queue_seconds
            _log.info("requests wait %.1f s: %s, and %d wanted", queue_seconds, counted(groups, "group"), wanted)
        if wanted > groups:
            await self._change_size(groups, wanted, is_new=is_new)
        elif self._removal is None:
            self._removal_from = groups
            self._removal = asyncio.create_task(self._change_size(groups, wanted, is_new=is_new))
            await asyncio.sleep(0)  # let the removal begin

    async def _change_size(self, groups: int, wanted: int, *, is_new: bool) -> None:
        try:
            await self._scale_groups(groups, wanted, _DRAIN_SECONDS)
        except InsufficientResources as error:
            # Checking what is free is cheap, and a node may be starting: the next sample tries again.
            if is_new:
                _log.warning("still %s: %s", counted(groups, "group"), error)
        except CoatcheckError as error:
            _log.warning("still %s: %s", counted(groups, "group"), error)
            self._not_before = self._clock() + _RETRY_SECONDS  # from now on, because a group may fail after minutes

    async def _add_sample(self, now: float, longest: float) -> int:
        """Add a sample, drop those that are older than `longest` seconds, and return the number of groups."""
        (queue_seconds, busy_groups), groups = await self._measure_queue(), self._count_groups()
        if groups != self._last_count:
            self._samples.clear()
            self._last_count = groups
        self._samples.append(QueueSample(now, queue_seconds, busy_groups))
        # One sample from before the period stays, because it tells how the period began.
        while len(self._samples) > 1 and self._samples[1].time <= now - longest:
            self._samples.popleft()
        return groups

    async def _request_nodes(self, wanted: int, groups: int) -> None:
        # Only growth needs a request: running groups hold their nodes. A request that stays would also keep an idle
        # node alive if a group fits on it.
        request = wanted if wanted > groups else 0
        if request != self._last_request:
            await asyncio.to_thread(self._request_room, request)
            self._last_request = request
