"""Time to make a page of /metrics, by number of groups: registry, values and text, as for one scrape.

python bench/router_cases/metrics.py [--groups 64] [--ranks 8]
"""

import statistics
import time
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

from coatcheck.bench.setup.results_file import describe_machine
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus, RankStatus, StatusResponse, Usage
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics


def main(
    groups: Annotated[int, typer.Option(min=1, help="Groups.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Pages.")] = 50,
) -> None:
    """Measure pages, and the cost of counting one request."""
    print(describe_machine())
    registry = CollectorRegistry()
    counts = RequestMetrics(registry)
    exercise(counts, 1000)
    status = busy_status(groups, ranks)
    metrics = PrometheusPage(lambda: status, registry)
    metrics.render()
    taken = [timed(metrics) for _ in range(rounds)]
    size = len(metrics.render())
    print(
        f"{groups} groups of {ranks} ranks: median {statistics.median(taken) * 1e3:.2f} ms, "
        f"most {max(taken) * 1e3:.2f}, {size / 1024:.0f} KiB; at most 20 ms"
    )
    began = time.perf_counter()
    exercise(counts, 10_000)
    print(f"counting one request of 100 deltas: {(time.perf_counter() - began) / 10_000 * 1e6:.1f} µs")


def timed(metrics: PrometheusPage) -> float:
    """Seconds of one page."""
    began = time.perf_counter()
    metrics.render()
    return time.perf_counter() - began


def exercise(metrics: RequestMetrics, requests: int) -> None:
    """Record `requests` requests of a hundred deltas each."""
    usage = Usage(prompt_tokens=100, completion_tokens=100)
    for number in range(requests):
        metrics.queue.record(0.001 * (number % 10))
        for _ in range(99):
            metrics.itl.record(0.02)
        metrics.record_answer(usage, 0.1, 2.08)
        metrics.record_end(None, 2.0)


def busy_status(groups: int, ranks: int) -> StatusResponse:
    """A router's status with `groups` groups and every number set."""
    fields = [field.name for field in GroupStatus.DESCRIPTOR.fields if field.cpp_type in (1, 2, 3, 4, 5)]
    status = StatusResponse(state="serving", model=GetModelResponse(name="m", block_size=16), active_streams=512)
    for number in range(groups):
        group = status.groups.add(name=f"group-{number}", state="serving")
        for name in fields:
            if not GroupStatus.DESCRIPTOR.fields_by_name[name].is_repeated:
                setattr(group, name, number + 1)
        group.expert_tokens.extend([number + 1] * 8)
        group.ranks.extend(
            RankStatus(rank=rank, healthy=True, node=f"node-{number % 8}", steps=10**6, peak_memory_bytes=70 << 30)
            for rank in range(ranks)
        )
    return status


if __name__ == "__main__":
    typer.run(main)
