"""The router's /metrics page after every metric has been recorded once."""

from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.metrics import busy_status, exercise
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_metrics import GroupMetrics
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics


def exercised_page() -> str:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    exercise(metrics, 1)
    metrics.record_group_lost("group-0", has_begun=True)
    metrics.record_group_lost("group-0", has_begun=False)
    metrics.record_resume()
    registry.register(GroupMetrics(GroupRegistry(RouterConfig(model="m")), RetryBudget()))
    return PrometheusPage(lambda: busy_status(2, 2), registry).render().decode()
