"""When a group tells its routers how it is."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coatcheck.workers.core.step_output import EngineStats
from coatcheck.workers.engine.engine_loop import HEARTBEAT_SECONDS
from coatcheck.workers.service.group_report import LoadReportSchedule

STATS = EngineStats(
    running=1,
    waiting=0,
    blocks_total=8,
    blocks_used=1,
    blocks_cached=0,
    queued_prefill_tokens=0,
    prompt_tokens=1,
    cached_device_tokens=0,
    cached_host_tokens=0,
    generated_tokens=1,
    preemptions=0,
    steps=1,
    prefill_seconds=1.0,
    prefill_tokens_per_second=100.0,
    step_seconds=0.1,
)


def test_each_step_that_changes_something_is_told_once() -> None:
    """New figures are due at once, the same ones are not due again."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    assert schedule.is_due(STATS, 10.0, 0.0)
    assert not schedule.is_due(STATS, 10.1, 0.1)
    assert schedule.is_due(replace(STATS, generated_tokens=2), 10.2, 0.0)


def test_a_group_that_does_nothing_is_told_once_a_second() -> None:
    """Steps that change nothing, those of an idle engine, are told of seldom."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    told = [tick / 10 for tick in range(30) if schedule.is_due(replace(STATS), 10 + tick / 10, 0.0)]
    assert len(told) == 4 and all(0.85 < later - earlier <= 1.05 for earlier, later in pairwise(told))


@pytest.mark.parametrize(("rate", "longest"), [(100.0, 7.0), (0.0, 63.0)])
def test_a_long_step_is_told_of_until_it_is_too_long(rate: float, longest: float) -> None:
    """While a step may take so long at the measured rate the group speaks; then silence says that it is stuck."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    stats = replace(STATS, prefill_tokens_per_second=rate)
    assert schedule.is_due(stats, 0.0, 0.0)
    assert not schedule.is_due(stats, 1.0, HEARTBEAT_SECONDS)
    assert schedule.is_due(stats, longest - 0.1, longest - 0.1)
    assert not schedule.is_due(stats, longest + 1.1, longest + 0.1)
