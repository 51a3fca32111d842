"""What a group says of itself on the wire, from what its engine has counted."""

import logging

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import RankStatus, SamplingParams
from coatcheck.proto.stubs.worker_pb2 import Registration, Submit
from coatcheck.workers.core.cache_reasons import EvictionMark, EvictionReason, MissReason, PrefixMiss, Tier
from coatcheck.workers.core.step_output import SequenceOutput
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.request_log import RequestLog
from coatcheck.workers.service.wire import request_from_message
from tests.workers.kv.two_tier_engine import ask, make_engine


def test_every_count_of_the_tiers_reaches_the_status() -> None:
    """Evictions and misses by reason, and the bytes that moved on all ranks together."""
    engine, _ = make_engine(24, 12)
    for i in range(12):
        ask(engine, f"flood{i}", [100 + i] * 80)
    stats = engine.stats()
    ranks = [RankStatus(rank=rank) for rank in range(2)]
    status = GroupReport(Registration(group="g"), ranks, bytes_per_block=100).build_status(stats, "")
    assert status.device_evictions.worth_least == stats.device_evictions[EvictionReason.WORTH_LEAST] > 0
    assert status.host_evicted.worth_least == status.host_evictions > 0
    assert status.prefix_misses.never_seen == 12
    assert status.demoted_bytes == 2 * 100 * stats.demotions > 0


def test_every_reason_has_its_field() -> None:
    """A reason that the contract cannot name would be lost: there is none."""
    status = GroupReport(Registration(group="g"), []).build_status(make_engine()[0].stats(), "")
    for reason in EvictionReason:
        assert getattr(status.device_evictions, reason.name.lower()) == 0
    for reason in MissReason:
        assert getattr(status.prefix_misses, reason.name.lower()) == 0


def test_the_log_says_why_a_prefix_missed(caplog: pytest.LogCaptureFixture) -> None:
    """The line of each request that has ended names the reason, the block, and when and how it was evicted."""
    log = RequestLog("g")
    answer = log.open_request("mine", 40, {})
    mark = EvictionMark(10.0, Tier.HOST, EvictionReason.OVER_SHARE)
    miss = PrefixMiss(3, MissReason.EVICTED, mark, 2.5)
    log.record_output(answer, SequenceOutput("0.1", 0, [7], cached_device_tokens=12, miss=miss))
    with caplog.at_level(logging.INFO, "coatcheck"):
        log.close_request(answer, "ok")
    said = vars(caplog.records[-1])
    assert (said["prefix_miss"], said["prefix_miss_block"], said["cached_device_tokens"]) == ("evicted", 3, 12)
    assert (said["evicted_from"], said["evicted_as"], said["evicted_seconds_ago"]) == ("host", "over_share", 2.5)


def test_blocks_count_towards_their_tenant() -> None:
    """A submission's tenant owns its blocks whatever their salt; without one each salt is somebody."""
    submit = Submit(id=1, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1, seed=1), cache_salt="a")
    assert request_from_message(submit, "1").owner == "a"
    submit.tenant = "us"
    assert request_from_message(submit, "1").owner == "us"
