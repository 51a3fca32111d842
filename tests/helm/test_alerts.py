"""The chart's alerts: Prometheus' own engine takes the rules, and fires each in the case that operations.md names."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.helm.chart import CHART, render
from tests.helm.exercised_page import exercised_page
from tests.programs.find import need_program

_OF = 'job="demo-coatcheck",namespace="default"'

# Of each alert: a series that makes it fire, how long until then, and a value of the same series that does not.
# 0+60x90 is Prometheus' notation: from 0, 60 more every minute, 90 times.
CASES = {
    "CoatcheckNotAccepting": (f"coatcheck_accepting{{{_OF}}}", "0x90", "2m", "1x90"),
    "CoatcheckGroupNotServing": (f'coatcheck_group_state{{{_OF},group="g",state="lost"}}', "1x90", "16m", "0x90"),
    "CoatcheckGroupRestarts": (f'coatcheck_group_restarts_total{{{_OF},group="g"}}', "0+1x90", "10m", "3x90"),
    "CoatcheckGroupSlow": (f'coatcheck_group_slowness_ratio{{{_OF},group="g"}}', "7x90", "3m", "1.2x90"),
    "CoatcheckOverloaded": (f'coatcheck_group_waiting_sequences{{{_OF},group="g"}}', "3x90", "7m", "0x90"),
    "CoatcheckPreemptions": (f'coatcheck_group_preemptions_total{{{_OF},group="g"}}', "0+90x90", "20m", "0+30x90"),
    "CoatcheckIntegrityFailures": (f"coatcheck_group_integrity_failures_total{{{_OF}}}", "0+1x90", "5m", "5x90"),
}  # fmt: skip


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = render("eight-gpus").one("PrometheusRule")["spec"]["groups"][0]["rules"]
    return found


def promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """`promtool test rules`: how many alerts each test expects at its time."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(render("eight-gpus").one("PrometheusRule")["spec"]))
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content))
    command = [need_program("promtool"), "test", "rules", str(tmp_path / "tests.yaml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS)


def case(name: str, series: list[dict[str, str]], time: str, *, fires: bool) -> dict[str, Any]:
    """A test of promtool: `name` fires, or does not, at `time`."""
    (rule,) = (rule for rule in rules() if rule["alert"] == name)
    query = {"expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})', "eval_time": time}
    sample = [{"labels": "{}", "value": 1}] if fires else []
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    return {"interval": "1m", "input_series": series, "promql_expr_test": [query | {"exp_samples": sample}]}


@pytest.mark.parametrize("name", CASES)
def test_it_fires_when_it_should(name: str, tmp_path: Path) -> None:
    """In the case that the page of operations names, and not in a harmless one."""
    series, bad, time, good = CASES[name]
    tests = [
        case(name, [{"series": series, "values": values}], time, fires=values == bad) for values in (bad, good)
    ]  # fmt: skip
    done = promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_router_can_be_scraped(tmp_path: Path) -> None:
    """Silence is an alert too."""
    done = promtool(tmp_path, [case("CoatcheckNotAccepting", [], "2m", fires=True)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_router_of_two_accepts(tmp_path: Path) -> None:
    """A router that drains for an upgrade wakes nobody."""
    of_pod = f'coatcheck_accepting{{{_OF},pod="%s"}}'
    series = [{"series": of_pod % "a", "values": "0x9"}, {"series": of_pod % "b", "values": "1x9"}]
    done = promtool(tmp_path, [case("CoatcheckNotAccepting", series, "5m", fires=False)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("today", "fires"), [(100, True), (800, False)])
def test_the_cache_holds_less_than_a_day_ago(today: int, fires: bool, tmp_path: Path) -> None:
    """It fires once the share of cached tokens is less than half of yesterday's."""
    cached = f"0+900x1500 {900 * 1500 + today}+{today}x240"
    series = [
        {"series": f'coatcheck_group_cached_tokens_total{{{_OF},group="g",tier="device"}}', "values": cached},
        {"series": f'coatcheck_group_prompt_tokens_total{{{_OF},group="g"}}', "values": "0+1000x1740"},
    ]
    done = promtool(tmp_path, [case("CoatcheckCacheHitsFell", series, "1700m", fires=fires)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_documented() -> None:
    """The table of operations.md names exactly the alerts that the chart makes."""
    names = {rule["alert"] for rule in rules()}
    assert names == CASES.keys() | {"CoatcheckCacheHitsFell"}
    page = (CHART.parents[1] / "docs" / "operations.md").read_text()
    assert set(re.findall(r"`(Coatcheck[A-Z]\w+)`", page)) == names


def test_every_metric_and_label_exists() -> None:
    """The expressions use what the router's /metrics page has."""
    page = exercised_page()
    for rule in rules():
        for metric, selector in re.findall(r"(coatcheck_\w+)\{([^}]*)\}", rule["expr"]):
            assert f"\n{metric}" in page
            for label in set(re.findall(r"(\w+)=~?\"", selector)) - {"job", "namespace"}:
                assert re.search(rf"{metric}\{{[^}}]*{label}=", page)


def test_the_operator_finds_the_rules() -> None:
    """By the labels given; without `prometheusRule.enabled` there are none."""
    labels = render("eight-gpus", "prometheusRule.labels.release=p").one("PrometheusRule")["metadata"]["labels"]
    assert labels["release"] == "p"
    assert ("PrometheusRule", "demo-coatcheck") not in render("cpu").objects
