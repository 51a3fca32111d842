"""GroupFailureMetrics: groups that this router has lost, by cause, and what it may still spend on going on elsewhere.

Read when somebody asks. It does not know what becomes of a request that has lost its group.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coatcheck.router.groups.group_failures import FailureCause, GroupFailures
from coatcheck.router.groups.retry_budget import RetryBudget


class GroupFailureMetrics(Collector):
    """To be registered once for a router."""

    def __init__(self, losses: GroupFailures, retries: RetryBudget) -> None:
        self._losses = losses
        self._retries = retries

    def collect(self) -> Iterator[Metric]:
        """Every family, also where nothing has happened yet."""
        losses, retries = self._losses, self._retries
        for name, text, counts in (
            ("losses", "Groups that were lost, by why, as far as it was known then.", losses.counts),
            ("losses_explained", "Those whose cause became known later, by what it was.", losses.learned),
        ):
            family = CounterMetricFamily(f"coatcheck_group_{name}", text, labels=["cause"])
            for cause in FailureCause:
                family.add_metric([cause.value], counts[cause])
            yield family
        yield CounterMetricFamily(
            "coatcheck_retry_budget_spent", "Requests sent again for the loss of a group.", value=retries.spent
        )
        yield CounterMetricFamily(
            "coatcheck_retry_budget_delayed", "Those beyond the budget, which had to wait.", value=retries.delayed
        )
        yield GaugeMetricFamily(
            "coatcheck_retry_budget_requests", "Requests that would be sent again at once now.", value=retries.left
        )
