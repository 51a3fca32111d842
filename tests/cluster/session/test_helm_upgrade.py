"""`helm upgrade` on a real Ray of several nodes: what the chart renders before and after is given to the head's
container and to the nodes, as Kubernetes and KubeRay would."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coatcheck.bench.setup.ray_nodes import RayNodes
from tests.cluster.running_server import RunningServer, until
from tests.helm.chart import Rendered, render


class HeadPod:
    """The container of `serve`: runs the rendered script. Only paths, addresses and ports are this machine's."""

    def __init__(self, folder: Path, nodes: RayNodes) -> None:
        self._folder, self._nodes = folder, nodes
        self.ready_file, self.log = folder / "ready", folder / "log"

    def mount(self, rendered: Rendered) -> None:
        """Write the ConfigMap's file, as the kubelet does after an upgrade. Two routers on one machine need other
        ports."""
        text = re.sub(r"(?m)^(grpc|http)_port: \d+$", r"\1_port: 0", rendered.one("ConfigMap")["data"]["serve.yaml"])
        part = self._folder / "part"
        part.write_text(text)
        part.replace(self._folder / "serve.yaml")

    @contextmanager
    def run(self, rendered: Rendered) -> Iterator[None]:
        container = rendered.templates[0]["spec"]["containers"][1]
        script = container["args"][0].replace("/etc/coatcheck", str(self._folder))
        script = script.replace("/tmp/coatcheck-ready", str(self.ready_file))
        script = script.replace('"$POD_IP:6379"', self._nodes.address)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self._nodes.environment, "PATH": path}
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [*container["command"], script], stderr=log, stdout=log, env=environment, start_new_session=True
            )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_said(self, text: str) -> re.Match[str]:
        """Wait until `serve` has printed what the pattern finds."""
        until(lambda: bool(re.search(text, self.log.read_text())), f"serve says {text}", else_tell=self.log.read_text)
        found = re.search(text, self.log.read_text())
        assert found
        return found


def add_pods(nodes: RayNodes, rendered: Rendered, group: str, count: int) -> None:
    """Start a Ray node with the rendered parameters for each of `count` pods of a worker group."""
    parameters = rendered.group(group)["rayStartParams"]
    resources = {name: float(number) for name, number in json.loads(parameters.get("resources", "'{}'")[1:-1]).items()}
    for _ in range(count):
        nodes.add(int(parameters["num-cpus"]), resources)


@pytest.mark.ray
@pytest.mark.full  # a minute on two cores, most of it a dozen processes that import Ray and torch
def test_an_upgrade_changes_the_running_cluster(tmp_path: Path, tiny_model: Path) -> None:
    """A second router pod gets a router, a group less drains and ends, another `tp` is refused and makes the head not
    ready, and the values before bring all of it back. No process of the group that stays ends."""
    model = f"model.name={tiny_model}"
    always = (model, "settings.kv_memory=4MiB", "events.enabled=false")
    before = render("cpu", *always)
    with RayNodes(tmp_path) as nodes:
        add_pods(nodes, before, "router", before.group("router")["replicas"])
        add_pods(nodes, before, "worker", before.group("worker")["replicas"])
        head = HeadPod(tmp_path, nodes)
        head.mount(before)
        with head.run(before):
            until(head.ready_file.exists, "the head is ready", else_tell=head.log.read_text)
            first = head.wait_said(r"ready: .* at ([^\s,]+) and")[1]
            assert groups_of(first).keys() == {"group-0", "group-1"}
            stays = groups_of(first)["group-0"]

            after = render("cpu", *always, "router.replicas=2", "model.groups=1")
            assert after.group("router")["replicas"] == 2 and after.group("worker")["replicas"] == 1
            head.mount(after)
            add_pods(nodes, after, "router", 1)
            second = head.wait_said(r"another router at (\S+)")[1]
            for address in (first, second):
                until(partial(has_groups, address, {"group-0": stays}), "one group is left")
            until(head.ready_file.exists, "all settings are in use", else_tell=head.log.read_text)

            head.mount(render("cpu", *always, "router.replicas=2", "model.groups=2", "model.tp=2"))
            head.wait_said("error: a running cluster cannot change tp from 1 to 2")
            until(lambda: not head.ready_file.exists(), "the head is not ready")
            until(lambda: "tp from 1 to 2" in status_of(first)["configuration"], "status says it")

            head.mount(before)
            until(lambda: groups_of(second).keys() == {"group-0", "group-1"}, "the group is back")
            until(head.ready_file.exists, "all settings are in use", else_tell=head.log.read_text)
            assert groups_of(first)["group-0"] == stays


def has_groups(address: str, groups: dict[str, int]) -> bool:
    """Whether exactly these groups serve, with these processes."""
    return groups_of(address) == groups


def status_of(address: str) -> dict[str, Any]:
    """What `coatcheck status --json` says of the router at this address."""
    router = RunningServer()
    router.address = address
    return router.status()


def groups_of(address: str) -> dict[str, int]:
    """The process id of rank 0 of each group that serves, as this router reports it."""
    groups = status_of(address)["groups"]
    return {group["name"]: group["ranks"][0]["pid"] for group in groups if group["state"] == "serving"}
