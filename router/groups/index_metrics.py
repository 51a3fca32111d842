"""IndexMetrics: what this router knows of groups' blocks, and what was wrong with how it was told, for Prometheus.

Read when somebody asks. It does not know what becomes of a group that errs.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.routing.event_trouble import EventProblem


class IndexMetrics(Collector):
    """To be registered once for a router's groups."""

    def __init__(self, groups: GroupRegistry) -> None:
        self._groups = groups

    def collect(self) -> Iterator[Metric]:
        """Every family, also where nothing has happened yet."""
        index = self._groups.index
        yield GaugeMetricFamily("coatcheck_index_blocks", "Blocks known, by group and tier.", value=index.entries)
        yield CounterMetricFamily("coatcheck_index_events", "KV events that groups have sent.", value=index.events)
        troubles = CounterMetricFamily(
            "coatcheck_index_troubles", "KV events that were wrong, by how; none gives a false prefix.", labels=["kind"]
        )
        for kind in EventProblem:
            troubles.add_metric([kind.value], index.troubles[kind])
        yield troubles
        yield _ejections(self._groups.links)


def _ejections(links: Iterable[GroupConnection]) -> Metric:
    family = CounterMetricFamily(
        "coatcheck_group_ejections", "Streams ended for silence, for slowness, or for what cannot be.", labels=["group"]
    )
    for link in links:
        family.add_metric([link.name], link.ejections)
    return family
