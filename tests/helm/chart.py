"""Renders the chart with helm."""

import json
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.programs.find import need_program

CHART = Path(__file__).parents[2] / "helm" / "coatcheck"
# Values with which the chart makes everything for Prometheus and Grafana.
MONITORED = ("grafana.dashboard=true", "serviceMonitor.enabled=true")
VALUES = sorted(file.stem for file in (CHART / "values").iterdir())


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm. The test is skipped if helm is not installed."""
    command = [need_program("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS)


@dataclass(frozen=True)
class Rendered:
    """Objects by (kind, name without the release's)."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def one(self, kind: str, name: str = "demo-coatcheck") -> dict[str, Any]:
        return self.objects[kind, name]

    @property
    def cluster(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.one("RayCluster")["spec"]
        return spec

    def group(self, name: str) -> dict[str, Any]:
        """A worker group of the RayCluster."""
        return next(group for group in self.cluster["workerGroupSpecs"] if group["groupName"] == name)

    def container(self, name: str) -> dict[str, Any]:
        """The Ray container of a worker group."""
        found: dict[str, Any] = self.group(name)["template"]["spec"]["containers"][0]
        return found

    @property
    def templates(self) -> list[dict[str, Any]]:
        """The pod template of the head, then that of each worker group."""
        groups = [group["template"] for group in self.cluster["workerGroupSpecs"]]
        return [self.cluster["headGroupSpec"]["template"], *groups]


@cache
def render(values: str, *settings: str) -> Rendered:
    """`helm template` with a values file of the chart and `--set` of each setting."""
    flags = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "demo", str(CHART), "-f", str(CHART / "values" / f"{values}.yaml"), *flags)
    assert done.returncode == 0, done.stderr
    return rendered_objects(done.stdout)


def rendered_objects(text: str) -> Rendered:
    """The objects that `helm template` has printed."""
    loaded = [one for one in yaml.safe_load_all(text) if one]
    return Rendered({(one["kind"], one["metadata"]["name"]): one for one in loaded})


def refusal(values: str, *settings: str) -> str:
    """The error message of helm for settings that it refuses."""
    return helm_error(values, "demo", *settings)


def helm_error(values: str, release: str, *settings: str) -> str:
    """The error message of `helm template` for a release that it refuses."""
    flags = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", release, str(CHART), "-f", str(CHART / "values" / f"{values}.yaml"), *flags)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


def dashboard_of(*settings: str) -> dict[str, Any]:
    """The dashboard as the sidecar of Grafana reads it."""
    loaded: dict[str, Any] = json.loads(
        render("cpu", *MONITORED, *settings).one("ConfigMap", "demo-coatcheck-dashboard")["data"]["coatcheck.json"]
    )
    return loaded
