"""GroupMetrics: Prometheus metrics of the prefix index, of lost groups and of the retry budget.

Values are read at each scrape.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coatcheck.router.groups.group_failures import FailureCause
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.routing.block_locations import EventProblem


class GroupMetrics(Collector):
    """Register it once for a router. Every metric exists from the start."""

    def __init__(self, groups: GroupRegistry, retries: RetryBudget) -> None:
        self._groups = groups
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        index, failures, retries = self._groups.index, self._groups.failures, self._retries
        yield GaugeMetricFamily(
            "coatcheck_index_blocks",
            "Blocks in the prefix index, counted once for each group and tier.",
            value=index.entries,
        )
        yield CounterMetricFamily("coatcheck_index_events", "KV events that groups have sent.", value=index.events)
        problems = CounterMetricFamily(
            "coatcheck_index_event_problems",
            "KV events that could not be applied as sent, by problem; none creates a false prefix.",
            labels=["problem"],
        )
        for problem in EventProblem:
            problems.add_metric([problem.value], index.problems[problem])
        yield problems
        ejections = CounterMetricFamily(
            "coatcheck_group_ejections",
            "Streams ended because the group was silent, slow, or sent impossible messages.",
            labels=["group"],
        )
        for connection in self._groups.connections:
            ejections.add_metric([connection.name], connection.ejections)
        yield ejections
        for name, text, counts in (
            ("losses", "Groups that were lost, by the cause known at that time.", failures.counts),
            ("losses_explained", "Losses whose cause became known later, by cause.", failures.explained),
        ):
            family = CounterMetricFamily(f"coatcheck_group_{name}", text, labels=["cause"])
            for cause in FailureCause:
                family.add_metric([cause.value], counts[cause])
            yield family
        yield CounterMetricFamily(
            "coatcheck_retry_budget_spent", "Requests sent again after the loss of a group.", value=retries.spent
        )
        yield CounterMetricFamily(
            "coatcheck_retry_budget_delayed",
            "Requests beyond the retry budget, which had to wait.",
            value=retries.delayed,
        )
        yield GaugeMetricFamily(
            "coatcheck_retry_budget_requests", "Requests that would be sent again at once now.", value=retries.left
        )
