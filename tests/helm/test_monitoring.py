"""The dashboard and the ServiceMonitor of the chart fit the metrics and the Service."""

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.helm.chart import MONITORED, dashboard_of, render
from tests.helm.exercised_page import exercised_page


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query")


def test_every_metric_of_the_dashboard_exists() -> None:
    """Each metric and each label in the queries is on the /metrics page of the router."""
    families = text_string_to_metric_families(exercised_page())
    samples = [sample for family in families for sample in family.samples]
    known = {sample.name: set(sample.labels) for sample in samples} | {"job": set()}
    asked = list(queries(dashboard_of()))
    used = {name for query in asked for name in re.findall(r"coatcheck_\w+", query)}
    assert used - known.keys() == set() and len(used) > 25
    everywhere = {label for labels in known.values() for label in labels} | {"job", "le"}
    for query in asked:
        for names in re.findall(r"by \(([^)]*)\)", query):
            assert set(names.replace(" ", "").split(",")) <= everywhere, query
        for name, selector in re.findall(r"(coatcheck_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~?\"", selector)) - {"job"} <= known[name], query


def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    """Panels do not overlap, have a title, a unit and a query, and every latency has its histogram."""
    dashboard = dashboard_of()
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24 and panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
    text = " ".join(queries(dashboard))
    for latency in ("ttft", "tpot", "itl", "queue", "request"):
        assert f"coatcheck_{latency}_seconds_bucket" in text
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_grafana_finds_it_only_when_asked() -> None:
    """The ConfigMap has the label and the folder for the sidecar. Without `grafana.dashboard` there is no ConfigMap."""
    made = render("cpu", *MONITORED, "grafana.folder=LLM").one("ConfigMap", "demo-coatcheck-dashboard")["metadata"]
    assert made["labels"]["grafana_dashboard"] == "1" and made["annotations"] == {"grafana_folder": "LLM"}
    assert ("ConfigMap", "demo-coatcheck-dashboard") not in render("cpu").objects


def test_the_monitor_finds_the_service() -> None:
    """The ServiceMonitor selects the Service by labels that it has, a port that it names, and shows a key if told."""
    rendered = render("one-gpu", *MONITORED, "serviceMonitor.labels.release=p", "monitorKey.name=observer")
    monitor, service = rendered.one("ServiceMonitor"), rendered.one("Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]} and endpoint["path"] == "/metrics"
    assert endpoint["authorization"] == {"credentials": {"name": "observer", "key": "key"}}
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert "authorization" not in render("cpu", *MONITORED).one("ServiceMonitor")["spec"]["endpoints"][0]
