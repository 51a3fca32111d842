"""When a group is added, and when one is removed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources
from coatcheck.cluster.supervision.autoscaler import Autoscaler, AutoscaleRule, QueueSample
from coatcheck.proto.errors import CoatcheckError, InvalidConfig, Unavailable

RULE = AutoscaleRule(min_groups=1, max_groups=3, target_seconds=2.0, grow_hold_seconds=10.0, shrink_hold_seconds=60.0)


def each_second(count: int, queue_seconds: float, busy: int = 2) -> list[QueueSample]:
    """`count` equal samples, one a second, from time 0 on."""
    return [QueueSample(float(time), queue_seconds, busy) for time in range(count)]


@pytest.mark.parametrize(
    ("samples", "groups", "wished"),
    [
        ([], 2, 2),
        (each_second(11, 2.5), 2, 3),
        (each_second(10, 2.5), 2, 2),  # not yet for long enough
        (each_second(11, 2.0), 2, 2),  # at the target, not above
        ([*each_second(10, 9.0), QueueSample(10.0, 0.5, 2)], 2, 2),  # it has just passed
        ([*each_second(5, 9.0), QueueSample(5.0, 0.0, 2), *each_second(17, 9.0)[6:]], 2, 3),  # the dip is long ago
        (each_second(11, 9.0), 3, 3),
        (each_second(11, 9.0), 5, 5),  # an operator wanted more than the most
        (each_second(61, 0.0, busy=1), 2, 1),
        (each_second(60, 0.0, busy=1), 2, 2),
        (each_second(61, 0.0, busy=2), 2, 2),  # nobody waits, and all have work
        (each_second(61, 0.1, busy=1), 2, 2),
        (each_second(61, 0.0, busy=0), 1, 1),
        (
            [QueueSample(0.0, 0.0, 2), QueueSample(70.0, 0.0, 1)],
            2,
            2,
        ),  # looks may be far apart: nobody knows since when
        ([QueueSample(0.0, 0.0, 2), QueueSample(10.0, 0.0, 1), QueueSample(70.0, 0.0, 1)], 2, 1),
        ([QueueSample(0.0, 0.0, 2), QueueSample(12.0, 9.0, 2)], 2, 2),
    ],
)
def test_the_number_follows_a_queue_that_lasts(samples: list[QueueSample], groups: int, wished: int) -> None:
    """One group more after ten seconds above the target, one fewer after a minute with an idle group."""
    assert RULE.choose_size(samples, groups, samples[-1].time if samples else 0.0) == wished


@given(
    waits=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 6)), max_size=80),
    groups=st.integers(1, 6),
)
def test_it_moves_by_one_within_its_bounds(waits: list[tuple[float, int]], groups: int) -> None:
    """Whatever the samples, the size changes by at most one and stays within the bounds."""
    samples = [QueueSample(float(time), seconds, busy) for time, (seconds, busy) in enumerate(waits)]
    wished = RULE.choose_size(samples, groups, float(len(waits)))
    assert abs(wished - groups) <= 1
    assert wished <= max(groups, RULE.max_groups) and wished >= min(groups, RULE.min_groups)


def test_bounds_that_cannot_be_are_refused() -> None:
    """A maximum below the number of groups is refused with both numbers."""
    with pytest.raises(InvalidConfig, match="max-groups is 1, and groups 2; it must be at least that"):
        ServeConfig.build({"model": "m", "groups": 2, "max_groups": 1})
    with pytest.raises(InvalidConfig, match="queue-target is 0"):
        ServeConfig.build({"model": "m", "queue_target": 0.0})


@pytest.mark.parametrize(
    ("failure", "tried"),
    [
        (InsufficientResources("1 group with tp 1 needs 1 CPU: 1 missing"), [*map(float, range(10, 21))]),
        (Unavailable("group-2 does not start"), [10.0, 25.0]),
    ],
)
async def test_room_is_asked_for_until_there_is_some(failure: CoatcheckError, tried: list[float]) -> None:
    """While requests wait, Ray is asked once for room for one group more. The group is added at the first sample
    that finds room or, after a failed start, 15 s later. Then the request is withdrawn, so that an idle node can be
    removed."""
    asked: list[int] = []
    tries: list[tuple[float, int]] = []
    clock, groups, free, queue = 0.0, 2, False, 5.0

    async def measure_queue() -> tuple[float, int]:
        return queue, 2

    async def scale(_: int, wished: int, __: float) -> None:
        nonlocal groups
        tries.append((clock, wished))
        if wished > groups and not free:
            raise failure
        groups = wished

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: groups,
        restarts_wait=lambda: False,
        request_room=asked.append,
        scale_groups=scale,
        clock=lambda: clock,
    )
    for clock in map(float, range(120)):
        free, queue = clock >= 20, 5.0 if clock < 40 else 0.0
        await autoscaler.evaluate_rule(clock)
    assert asked == [0, 3, 0]
    assert tries == [*((at, 3) for at in tried), (100.0, 2)]
    assert groups == 2


async def test_a_start_that_fails_late_is_not_repeated_at_once() -> None:
    """The 15 s until the next attempt begin when an attempt has failed, not when it began: a group may fail after
    minutes."""
    clock = 0.0
    tries: list[float] = []

    async def measure_queue() -> tuple[float, int]:
        return 5.0, 2

    async def scale(_: int, __: int, ___: float) -> None:
        nonlocal clock
        tries.append(clock)
        clock += 100
        raise Unavailable("group-2 does not start")

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: 2,
        restarts_wait=lambda: False,
        request_room=lambda groups: None,
        scale_groups=scale,
        clock=lambda: clock,
    )
    for _ in range(40):
        await autoscaler.evaluate_rule(clock)
        clock += 1
    assert tries == [10.0, 125.0]


async def test_idleness_may_be_shorter_than_a_queue() -> None:
    """With a shrink period shorter than the grow period, both still work: the samples reach back far enough for
    each."""
    groups, queue = 2, 5.0

    async def measure_queue() -> tuple[float, int]:
        return queue, 2

    async def scale(_: int, wished: int, __: float) -> None:
        nonlocal groups
        groups = wished

    rule = AutoscaleRule(min_groups=2, max_groups=3, target_seconds=1.0, shrink_hold_seconds=3.0)
    autoscaler = Autoscaler(
        rule,
        measure_queue=measure_queue,
        count_groups=lambda: groups,
        restarts_wait=lambda: False,
        request_room=lambda _: None,
        scale_groups=scale,
    )
    for clock in range(12):
        await autoscaler.evaluate_rule(float(clock))
    assert groups == 3
    queue = 0.0
    for clock in range(12, 18):
        await autoscaler.evaluate_rule(float(clock))
    assert groups == 2


@pytest.mark.parametrize("apart", [0.9, 2.4, 4.5, 7.0, 61.0])
async def test_looks_may_be_far_apart(apart: float) -> None:
    """An idle group is removed at the first sample after its minute, however seldom a busy machine takes samples."""
    wanted: list[float] = []
    clock = 0.0

    async def measure_queue() -> tuple[float, int]:
        return 0.0, 1

    async def scale(_: int, __: int, ___: float) -> None:
        wanted.append(clock)

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: 2,
        restarts_wait=lambda: False,
        request_room=lambda _: None,
        scale_groups=scale,
    )
    while not wanted and clock < 200.0:
        await autoscaler.evaluate_rule(clock)
        clock += apart
    assert wanted and wanted[0] - apart < 60.0 <= wanted[0]


async def test_without_a_rule_nothing_changes() -> None:
    """Settings without `max-groups` end autoscaling: Ray's autoscaler is no longer asked for a node, and the samples
    from before do not count later."""
    asked: list[int] = []
    tries: list[float] = []
    clock = 0.0

    async def measure_queue() -> tuple[float, int]:
        return 5.0, 2

    async def scale(_: int, __: int, ___: float) -> None:
        tries.append(clock)
        raise InsufficientResources("1 group with tp 1 needs 1 CPU: 1 missing")

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: 2,
        restarts_wait=lambda: False,
        request_room=asked.append,
        scale_groups=scale,
    )
    for clock in map(float, range(30)):
        autoscaler.set_rule(None if 12 <= clock < 15 else RULE)
        await autoscaler.evaluate_rule(clock)
    assert asked == [0, 3, 0, 3]
    assert tries == [10.0, 11.0, *map(float, range(25, 30))]


async def test_a_queue_during_a_removal_is_noticed() -> None:
    """While a group drains, which may take minutes, samples are taken, no second group is removed, and a queue that
    lasts adds a group. What fails unexpectedly is raised once."""
    calls: list[tuple[float, int, int]] = []
    clock, groups, queue = 0.0, 3, 0.0
    drained = asyncio.get_running_loop().create_future()

    async def measure_queue() -> tuple[float, int]:
        return queue, 1

    async def scale(before: int, wished: int, _: float) -> None:
        nonlocal groups
        calls.append((clock, before, wished))
        groups = wished
        if wished < before:
            await drained

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: groups,
        restarts_wait=lambda: False,
        request_room=lambda _: None,
        scale_groups=scale,
    )
    for clock in map(float, range(200)):
        queue = 0.0 if clock < 150 else 5.0
        await autoscaler.evaluate_rule(clock)
    assert calls == [(60.0, 3, 2), (160.0, 2, 3)]
    drained.set_exception(RuntimeError("Ray is gone"))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="Ray is gone"):
        await autoscaler.evaluate_rule(200.0)
    await autoscaler.evaluate_rule(201.0)


async def test_a_removal_that_waits_for_a_restart_is_taken_back() -> None:
    """The last group is idle, and its removal waits for minutes for the restart of another group. Then the group has
    work again: it is not removed. Once it has been idle for long enough again, it is."""
    calls: list[tuple[float, int]] = []
    clock, busy = 0.0, 1
    restarted = asyncio.Event()
    removed: list[float] = []

    async def measure_queue() -> tuple[float, int]:
        return 0.0, busy

    async def scale(_: int, wished: int, __: float) -> None:
        calls.append((clock, wished))
        await restarted.wait()
        removed.append(clock)

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: 3 - len(removed),
        restarts_wait=lambda: False,
        request_room=lambda _: None,
        scale_groups=scale,
    )
    for clock in map(float, range(300)):
        busy = 3 if 100 <= clock < 200 else 1
        if clock == 150:
            restarted.set()
        await autoscaler.evaluate_rule(clock)
        await asyncio.sleep(0)
    assert calls == [(60.0, 2), (260.0, 2)]
    assert removed == [260.0]


async def test_the_second_group_stays_while_groups_wait_for_a_restart() -> None:
    """With one group left no group could be restarted: the rollout of new settings would wait until more groups are
    needed."""
    wished_sizes: list[tuple[float, int]] = []
    clock, groups = 0.0, 3

    async def measure_queue() -> tuple[float, int]:
        return 0.0, 0

    async def scale(_: int, wished: int, __: float) -> None:
        nonlocal groups
        wished_sizes.append((clock, wished))
        groups = wished

    autoscaler = Autoscaler(
        RULE,
        measure_queue=measure_queue,
        count_groups=lambda: groups,
        restarts_wait=lambda: clock < 300.0,
        request_room=lambda _: None,
        scale_groups=scale,
    )
    for clock in map(float, range(400)):
        await autoscaler.evaluate_rule(clock)
    assert wished_sizes == [(60.0, 2), (300.0, 1)]
