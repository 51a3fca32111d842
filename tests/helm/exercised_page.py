"""The router's /metrics page after every metric has been recorded once."""

from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.metrics import busy_status, exercise
from coatcheck.router.groups.group_failures import GroupFailures
from coatcheck.router.groups.group_metrics import GroupFailureMetrics
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics


def exercised_page() -> str:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    measures = RequestMetrics(registry)
    exercise(measures, 1)
    measures.moved("group-0", begun=True)
    measures.moved("group-0", begun=False)
    measures.resumed()
    registry.register(GroupFailureMetrics(GroupFailures(), RetryBudget()))
    return PrometheusPage(lambda: busy_status(2, 2), registry).render().decode()
