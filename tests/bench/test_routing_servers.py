"""The comparison of routing policies on real servers: what it takes from a report of `coatcheck bench`."""

import pytest

from coatcheck.bench.routing_servers import COLUMNS, figures_of

LATENCY = {"mean": 3.0, "p50": 2.0, "p90": 4.0, "p99": 9.0}
REPORT = {
    "ttft_ms": LATENCY, "tpot_ms": {**LATENCY, "p90": 5.0}, "output_tokens_per_second": 80.0, "prompt_tokens": 200,
    "cached_device_tokens": 90, "cached_host_tokens": 10, "groups": {"group-0": 6, "group-2": 2},
}  # fmt: skip


def test_the_figures_of_a_report() -> None:
    """Latencies are in ms, hits count both tiers, and a group without requests counts in the mean."""
    figures = figures_of(REPORT, 4)
    assert COLUMNS.keys() <= figures.keys()
    assert (figures["ttft_p90"], figures["ttft_p99"], figures["tpot_p90"]) == (4.0, 9.0, 5.0)
    assert figures["hit_ratio"] == 0.5 and figures["groups_used"] == 2
    assert figures["max_over_mean"] == pytest.approx(3.0)  # 6 of 8 requests, where a fourth would be 2
