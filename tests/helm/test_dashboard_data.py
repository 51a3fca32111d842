"""The Grafana dashboard on a real Prometheus: every panel has data, and two routers are not counted as two clusters."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helm.chart import dashboard_of
from tests.helm.recorded_prometheus import GROUPS, RANKS, RecordedPrometheus, recorded_prometheus

# Routers count these themselves. What they repeat of their groups must be taken once.
_OF_ROUTERS = {"coatcheck_group_ejections_total"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedPrometheus]:
    """A Prometheus with scrapes of three routers."""
    with recorded_prometheus(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


def panels() -> Iterator[tuple[str, str]]:
    """(title, expression) of each query of the dashboard."""
    for panel in dashboard_of()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def ask(prometheus: RecordedPrometheus, expression: str, job: str) -> list[dict[str, Any]]:
    """The samples of a panel's expression with Grafana's variables filled in."""
    return prometheus.query(expression.replace("$job", job).replace("$__rate_interval", "1m"))


def value(prometheus: RecordedPrometheus, title: str, job: str) -> float:
    """The number that a panel with one query and one series shows."""
    (expression,) = (expression for name, expression in panels() if name == title)
    (sample,) = ask(prometheus, expression, job)
    return float(sample["value"][1])


def test_every_panel_has_data(prometheus: RecordedPrometheus) -> None:
    """No query is refused, returns nothing, or returns no number."""
    asked = list(panels())
    assert len(asked) > 40
    for title, expression in asked:
        samples = ask(prometheus, expression, "two")
        assert samples, f"{title}: {expression}"
        assert all(math.isfinite(float(sample["value"][1])) for sample in samples), f"{title}: {samples}"


@pytest.mark.parametrize("job", ["one", "two"])
def test_groups_count_once(prometheus: RecordedPrometheus, job: str) -> None:
    """Every router reports every group: two routers show as many groups, sequences and blocks as one does."""
    assert value(prometheus, "Serving groups", job) == GROUPS
    assert value(prometheus, "Running requests", job) == sum(range(1, GROUPS + 1))
    assert value(prometheus, "Unhealthy ranks", job) == 0
    (expression,) = (expression for title, expression in panels() if title == "Device blocks")
    one, other = ({str(sample["metric"]): sample["value"][1] for sample in ask(prometheus, expression, name)}
                  for name in ("one", job))  # fmt: skip
    assert one == other and RANKS > 1


def test_queues_of_routers_add_up(prometheus: RecordedPrometheus) -> None:
    """Three requests wait in each router, and the same three sequences in the groups."""
    assert [value(prometheus, "Waiting requests", job) for job in ("one", "two")] == [6, 9]


def test_no_query_counts_a_group_for_each_router() -> None:
    """What groups report is taken as the maximum over routers, except in a ratio of two sums."""
    for title, expression in panels():
        names = set(re.findall(r"coatcheck_(?:group|rank)_\w+", expression)) - _OF_ROUTERS
        assert not names or "max by (" in expression or " / " in expression, f"{title}: {expression}"


def test_the_list_of_jobs(prometheus: RecordedPrometheus) -> None:
    """The variable of the dashboard lists the releases."""
    assert prometheus.get("label/job/values", **{"match[]": "coatcheck_accepting"}) == ["one", "two"]
