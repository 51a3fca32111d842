"""Metrics: what a router knows of itself and its groups, in Prometheus' form.

Whoever counts something registers a metric of theirs with `registry`; what the groups report is read when somebody
asks. It does not know how it is served.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from .admin import Admin

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# field of GroupStatus: what it is
_GAUGES = {
    "running": "Sequences that run.",
    "waiting": "Sequences that wait for room.",
    "blocks_total": "KV blocks.",
    "blocks_used": "KV blocks that sequences hold.",
    "blocks_cached": "KV blocks that hold a prefix and can be taken at need.",
    "step_seconds": "A decode step, as measured lately.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of what was admitted.",
    "cached_device_tokens": "Those of them that were found on the device.",
    "cached_host_tokens": "Those of them that were found in host memory.",
    "generated_tokens": "Tokens generated.",
    "preemptions": "Sequences that had to give up their blocks.",
}


class Metrics(Collector):
    """Owns the registry."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        """The whole page."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """As the registry asks for it."""
        status = self._admin.report()
        yield GaugeMetricFamily("coatcheck_active_requests", "Requests that are open.", value=status.active_streams)
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"coatcheck_group_{name}", text, labels=["group"])
            for group in status.groups:
                gauge.add_metric([group.name], getattr(group, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"coatcheck_group_{name}", text, labels=["group"])
            for group in status.groups:
                counter.add_metric([group.name], getattr(group, name))
            yield counter
