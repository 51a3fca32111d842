"""What a group reports to its routers, and when."""

from dataclasses import replace
from itertools import pairwise

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import RankStatus
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason
from coatcheck.workers.core.step_output import EngineStats
from coatcheck.workers.engine.engine_loop import HEARTBEAT_SECONDS
from coatcheck.workers.service.group_report import GroupReport, LoadReportSchedule
from tests.workers.kv.two_tier_engine import ask, make_engine

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


def test_every_count_of_the_tiers_reaches_the_status() -> None:
    """Evictions and misses by reason, and the bytes that were copied on all ranks together."""
    engine, _ = make_engine(24, 12)
    for i in range(12):
        ask(engine, f"flood{i}", [100 + i] * 80)
    stats = engine.stats()
    ranks = [RankStatus(rank=rank) for rank in range(2)]
    status = GroupReport(Registration(group="g"), ranks, bytes_per_block=100).build_status(stats, "")
    assert status.device_evictions.lowest_value == stats.device_evictions[EvictionReason.LOWEST_VALUE] > 0
    assert status.host_evicted.lowest_value == status.host_evictions > 0
    assert status.prefix_misses.never_seen == 12
    assert status.demoted_bytes == 2 * 100 * stats.demotions > 0


def test_every_reason_has_its_field() -> None:
    """Every reason has a field of its name in the contract."""
    status = GroupReport(Registration(group="g"), []).build_status(make_engine()[0].stats(), "")
    for reason in EvictionReason:
        assert getattr(status.device_evictions, reason.name.lower()) == 0
    for miss in MissReason:
        assert getattr(status.prefix_misses, miss.name.lower()) == 0


def test_changed_stats_are_due_once() -> None:
    """New stats are due at once, the same ones are not due again."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    assert schedule.is_due(STATS, 10.0, 0.0)
    assert not schedule.is_due(STATS, 10.1, 0.1)
    assert schedule.is_due(replace(STATS, generated_tokens=2), 10.2, 0.0)


def test_unchanged_stats_are_due_once_a_second() -> None:
    """Stats that have not changed, as on an idle engine, are due once a second."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    due = [tick / 10 for tick in range(30) if schedule.is_due(replace(STATS), 10 + tick / 10, 0.0)]
    assert len(due) == 4 and all(0.85 < later - earlier <= 1.05 for earlier, later in pairwise(due))


@pytest.mark.parametrize(("rate", "longest"), [(100.0, 7.0), (0.0, 63.0)])
def test_load_is_due_during_a_long_step_until_it_is_too_long(rate: float, longest: float) -> None:
    """During a step load is due while a full prefill may take this long, and then not any more: the group is stuck."""
    schedule = LoadReportSchedule(max_batch_tokens=100)
    stats = replace(STATS, prefill_tokens_per_second=rate)
    assert schedule.is_due(stats, 0.0, 0.0)
    assert not schedule.is_due(stats, 1.0, HEARTBEAT_SECONDS)
    assert schedule.is_due(stats, longest - 0.1, longest - 0.1)
    assert not schedule.is_due(stats, longest + 1.1, longest + 0.1)
