"""/metrics: names follow Prometheus' conventions, and values follow events."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from coatcheck.bench.router_cases.metrics import busy_status
from coatcheck.proto.errors import Overloaded, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import (
    CacheAudit,
    Evictions,
    GenerateRequest,
    GroupStatus,
    PrefixMisses,
    RankStatus,
    SamplingParams,
    StatusResponse,
    Timings,
    TokenIds,
)
from coatcheck.proto.stubs.worker_pb2 import FirstOutput, Load
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RecentOutcomes, RequestMetrics
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter
from tests.router.telemetry.metric_lint import complaints

STATUS = GroupStatus(
    running=2,
    waiting=3,
    blocks_used=10,
    blocks_cached=20,
    blocks_total=64,
    host_blocks_total=8,
    host_blocks_used=5,
    prompt_tokens=100,
    cached_device_tokens=30,
    cached_host_tokens=20,
    restores=7,
    demotions=9,
    device_evictions=Evictions(lowest_value=11, over_fair_share=3),
    host_evicted=Evictions(lowest_value=4),
    prefix_misses=PrefixMisses(never_seen=8, evicted=5, other_salt=2),
    demoted_bytes=900,
    restored_bytes=700,
    integrity_failures=1,
    preemptions=6,
    late_compiles=2,
    state_snapshot_slots=16,
    state_snapshots_held=12,
    state_snapshot_saves=40,
    state_snapshot_restores=25,
    state_snapshot_evictions=13,
    ranks=[RankStatus(rank=0, healthy=True, node="a", steps=12, peak_memory_bytes=1000, weight_bytes=500)],
    expert_tokens=[3, 4],
)


def page(router: RouterUnderTest) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(router.server.metrics.render().decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(router: RouterUnderTest, name: str, labels: Mapping[str, str] | None = None) -> float:
    """The value of one sample, which must exist."""
    return page(router)[name, frozenset((labels or {}).items())]


def question(max_tokens: int = 4, **more: object) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=[5, 6, 7]),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        **more,  # type: ignore[arg-type]
    )


async def test_names_are_as_prometheus_wants_them(start_router: StartRouter) -> None:
    """The page parses; counters end in _total, units are base units and part of the name, and no name is used twice."""
    router = await start_router(FakeGroup())
    await router.generation.Generate(question())
    families = list(text_string_to_metric_families(router.server.metrics.render().decode()))
    assert list(complaints(families)) == []
    assert len([family for family in families if family.name.startswith("coatcheck_")]) > 40


def test_the_lint_sees_what_is_wrong() -> None:
    """A counter in milliseconds, a gauge named _total and a help text without a full stop are each reported."""
    registry = CollectorRegistry()
    Counter("coatcheck_wait_ms", "Waits.", registry=registry)
    Gauge("coatcheck_blocks_total", "Blocks", registry=registry)
    said = "\n".join(complaints(registry.collect()))
    assert "wait_ms: not in a base unit" in said and "ends in what a type adds" in said and "no sentence" in said


async def test_what_groups_report_is_there(start_router: StartRouter) -> None:
    """Blocks by tier and use, counters, ranks, and the metrics of the Gateway API inference extension."""
    group = FakeGroup()
    group.load = Load(status=STATUS)
    router = await start_router(group)
    await router.generation.Generate(question())  # behind its first report on the same stream
    there = {"group": "g0"}
    for use, count in (("used", 10), ("cached", 20), ("free", 34)):
        assert value(router, "coatcheck_group_blocks", {**there, "tier": "device", "use": use}) == count
    assert value(router, "coatcheck_group_blocks", {**there, "tier": "host", "use": "free"}) == 3
    for name, count in (
        ("restored_blocks", 7), ("demoted_blocks", 9), ("integrity_failures", 1),
        ("preemptions", 6), ("late_compiles", 2),
        ("state_snapshot_saves", 40), ("state_snapshot_restores", 25), ("state_snapshot_evictions", 13),
    ):  # fmt: skip
        assert value(router, f"coatcheck_group_{name}_total", there) == count
    assert value(router, "coatcheck_group_state_snapshot_slots", there) == 16
    assert value(router, "coatcheck_group_state_snapshots", there) == 12
    assert value(router, "coatcheck_group_cached_tokens_total", {**there, "tier": "host"}) == 20
    for tier, reason, count in (
        ("device", "lowest_value", 11),
        ("device", "over_fair_share", 3),
        ("host", "lowest_value", 4),
    ):
        assert value(router, "coatcheck_group_evicted_blocks_total", {**there, "tier": tier, "reason": reason}) == count
    for reason, count in (("never_seen", 8), ("evicted", 5), ("other_salt", 2), ("corrupt", 0)):
        assert value(router, "coatcheck_group_prefix_misses_total", {**there, "reason": reason}) == count
    assert value(router, "coatcheck_group_moved_bytes_total", {**there, "to": "host"}) == 900
    assert value(router, "coatcheck_group_state", {**there, "state": "serving"}) == 1
    assert value(router, "coatcheck_rank_healthy", {**there, "rank": "0", "node": "a"}) == 1
    assert value(router, "coatcheck_rank_steps_total", {**there, "rank": "0"}) == 12
    assert value(router, "coatcheck_rank_weight_bytes", {**there, "rank": "0"}) == 500
    assert value(router, "coatcheck_expert_tokens_total", {"expert": "1"}) == 4
    assert value(router, "coatcheck_queued_requests") == 3 and value(router, "coatcheck_running_requests") == 2
    assert value(router, "coatcheck_kv_utilization_ratio") == pytest.approx(10 / 64)
    assert value(router, "coatcheck_kv_block_size_tokens") == 4 and value(router, "coatcheck_kv_blocks") == 64
    assert value(router, "coatcheck_cache_config_info", {"block_size": "4", "num_gpu_blocks": "64"}) == 1


def test_counts_of_experts_never_fall() -> None:
    """The sum over the groups keeps the tokens of a group that is lost, and adds those of a group that has restarted.
    A group that comes back with its counts is not counted twice."""
    first, second = GroupStatus(name="a", expert_tokens=[3, 4]), GroupStatus(name="b", expert_tokens=[10, 20])
    status = StatusResponse()
    shown = PrometheusPage(lambda: status, CollectorRegistry())
    for groups, sums in (
        ([first, second], (13, 24)),
        ([first], (13, 24)),
        ([first, second], (13, 24)),
        ([first, GroupStatus(name="b", expert_tokens=[1, 0])], (14, 24)),
        ([first, GroupStatus(name="b", expert_tokens=[2, 5])], (15, 29)),
        ([GroupStatus(name="a")], (15, 29)),
    ):
        status.ClearField("groups")
        status.groups.extend(groups)
        lines = shown.render().decode().splitlines()
        for expert, tokens in enumerate(sums):
            assert f'coatcheck_expert_tokens_total{{expert="{expert}"}} {tokens}' in lines, groups


async def test_each_request_is_measured(start_router: StartRouter) -> None:
    """One answer of four tokens is one TTFT, one TPOT and one queue time, at most three gaps, and its tokens."""
    group = FakeGroup(hold_after=2)
    router = await start_router(group)
    async for event in router.generation.GenerateStream(question()):
        if event.HasField("delta"):
            group.go()
    for name in ("ttft", "tpot", "queue", "request"):
        assert value(router, f"coatcheck_{name}_seconds_count") == 1, name
    assert 1 <= value(router, "coatcheck_itl_seconds_count") <= 3
    assert value(router, "coatcheck_requests_total", {"outcome": "ok"}) == 1
    assert value(router, "coatcheck_tokens_total", {"kind": "completion"}) == 4
    assert value(router, "coatcheck_routing_prompts_total", {"group": "g0"}) == 1


async def test_refusals_are_counted_by_name(start_router: StartRouter) -> None:
    """A wrong request is counted under its error's name, and is not part of a latency."""
    router = await start_router(FakeGroup())
    with pytest.raises(grpc.aio.AioRpcError):
        await router.generation.Generate(question(max_tokens=10**6))
    assert value(router, "coatcheck_requests_total", {"outcome": "invalid_argument"}) == 1
    assert value(router, "coatcheck_ttft_seconds_count") == 0


async def test_a_lost_group_is_a_retry_or_a_failover(start_router: StartRouter) -> None:
    """A request that loses its group before its first token counts as a retry, after it as a failover."""
    first, second = FakeGroup("g0", die_on_submit=True), FakeGroup("g1")
    router = await start_router(first, second)
    for _ in range(8):
        await router.generation.Generate(question())
        if first.submits:
            break
    assert value(router, "coatcheck_retries_total", {"group": "g0"}) == 1
    assert ("coatcheck_failovers_total", frozenset({("group", "g0")})) not in page(router)


def test_a_page_of_many_groups_is_short_work() -> None:
    """A page of 64 groups of 8 ranks has every one of them (how fast it is: bench/router_cases/metrics.py)."""
    metrics = PrometheusPage(lambda: busy_status(64, 8), CollectorRegistry())
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert len(families["coatcheck_rank_healthy"].samples) == 512
    assert len(families["coatcheck_group_state"].samples) == 64 * 5


def test_an_audit_is_on_the_page() -> None:
    """Predicted and found cached tokens are counters of each group."""
    audit = CacheAudit(prompts=5, predicted_tokens=100, found_tokens=90, error_tokens=10, divergences=1)
    status = StatusResponse(groups=[GroupStatus(name="g", audit=audit)])
    metrics = PrometheusPage(lambda: status, CollectorRegistry())
    text = metrics.render().decode()
    assert 'coatcheck_routing_predicted_tokens_total{group="g"} 100' in text
    assert 'coatcheck_routing_divergences_total{group="g"} 1' in text


def test_outcomes_of_the_last_five_minutes() -> None:
    """The most frequent first; what is older than five minutes no longer counts."""
    now = 0.0
    outcomes = RecentOutcomes(clock=lambda: now)
    for outcome in ("ok", "ok", "queue_full"):
        outcomes.record(outcome)
    now = 200.0
    outcomes.record("cancelled")
    assert outcomes.counts() == [("ok", 2), ("queue_full", 1), ("cancelled", 1)]
    now = 310.0
    assert outcomes.counts() == [("cancelled", 1)]
    now = 900.0
    assert outcomes.counts() == []


def test_a_refused_request_counts_once() -> None:
    """By the reason of its refusal, and not as an error too."""
    metrics = RequestMetrics(CollectorRegistry())
    metrics.record_end(Overloaded("full", reason="queue_full"), 1.0)
    metrics.record_end(Unavailable("none"), 1.0)
    metrics.record_end(None, 1.0)
    assert sorted(metrics.outcomes.counts()) == [("ok", 1), ("queue_full", 1), ("unavailable", 1)]


def test_the_timings_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is that of the router and of the first group. A request that moves to another group does not wait anew,
    and the last delta of any choice counts."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lifecycle = RequestLifecycle(RequestMetrics(CollectorRegistry()))
    assert lifecycle.timings() is None
    decision: Any = SimpleNamespace(group="g")
    now = 101.0
    lifecycle.record_sent(decision, 0)
    lifecycle.record_first_output(FirstOutput(queued_seconds=0.5))
    for second, choice in ((102.0, 0), (105.0, 1), (107.0, 0)):
        now = second
        lifecycle.record_delta(choice)
    lifecycle.record_sent(decision, 1)
    lifecycle.record_first_output(FirstOutput(queued_seconds=3))
    assert lifecycle.timings() == Timings(queue_seconds=1.5, first_token_seconds=0.5, generation_seconds=5)
