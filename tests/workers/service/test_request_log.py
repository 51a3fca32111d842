"""What a group logs of each request."""

import logging

import pytest

from coatcheck.workers.core.cache_reasons import EvictionMark, EvictionReason, MissReason, PrefixMiss, Tier
from coatcheck.workers.core.step_output import SequenceOutput
from coatcheck.workers.service.request_log import RequestLog


def test_the_log_says_why_a_prefix_missed(caplog: pytest.LogCaptureFixture) -> None:
    """The log line of an ended request names the miss's reason and block, and when and how the block was evicted."""
    log = RequestLog("g")
    answer = log.open_request("mine", 40, {})
    mark = EvictionMark(10.0, Tier.HOST, EvictionReason.OVER_FAIR_SHARE)
    miss = PrefixMiss(3, MissReason.EVICTED, mark, 2.5)
    log.record_output(answer, SequenceOutput("0.1", 0, [7], cached_device_tokens=12, miss=miss))
    with caplog.at_level(logging.INFO, "coatcheck"):
        log.close_request(answer, "ok")
    said = vars(caplog.records[-1])
    assert (said["prefix_miss"], said["prefix_miss_block"], said["cached_device_tokens"]) == ("evicted", 3, 12)
    assert (said["evicted_from"], said["evicted_as"], said["evicted_seconds_ago"]) == ("host", "over_fair_share", 2.5)
