"""A real Prometheus that has scraped the /metrics pages of routers under load."""

import json
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.metrics import busy_status, exercise
from coatcheck.bench.setup.servers import free_port
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_metrics import GroupMetrics
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.telemetry.prometheus_page import CONTENT_TYPE, PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from tests.cluster.running_server import until
from tests.programs.find import need_program

SCRAPE_SECONDS = 0.25
GROUPS = 2
RANKS = 2
_GROWING = ("prompt_tokens", "generated_tokens", "cached_device_tokens", "cached_host_tokens")


class _Router:
    """A /metrics page. With each scrape further requests have ended, and groups have computed further tokens."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._metrics = RequestMetrics(registry)
        self._scrapes = 0
        registry.register(GroupMetrics(GroupRegistry(RouterConfig(model="m")), RetryBudget()))
        self._page = PrometheusPage(self._status, registry)

    def render(self) -> bytes:
        self._scrapes += 1
        exercise(self._metrics, 10)
        self._metrics.record_group_lost("group-0", has_begun=True)
        self._metrics.record_group_lost("group-0", has_begun=False)
        self._metrics.record_resume()
        return self._page.render()

    def _status(self) -> StatusResponse:
        status = busy_status(GROUPS, RANKS)
        status.queue_seconds = 1.5
        status.queued_requests = 3
        for group in status.groups:
            for name in _GROWING:
                setattr(group, name, getattr(group, name) * self._scrapes)
        return status


class RecordedPrometheus:
    """Jobs `one` and `two`: one router, and two routers of the same groups."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises HTTPError if Prometheus does not take the expression."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def get(self, path: str, **parameters: str) -> Any:
        """The data of a call of Prometheus' API."""
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]


@contextmanager
def recorded_prometheus(folder: Path) -> Iterator[RecordedPrometheus]:
    """Prometheus, once it has several scrapes of each router."""
    routers = [_Router() for _ in range(3)]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = routers[int(self.path.rpartition("/")[2])].render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    target = f"127.0.0.1:{exporter.server_address[1]}"
    scrapes = [
        {
            "job_name": f"router-{number}",
            "metrics_path": f"/{number}",
            "static_configs": [{"targets": [target], "labels": {"job": job, "instance": f"router-{number}"}}],
        }
        for number, job in enumerate(("one", "two", "two"))
    ]
    every = f"{SCRAPE_SECONDS * 1000:.0f}ms"
    settings = {"global": {"scrape_interval": every, "scrape_timeout": every}, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = [need_program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}", "--log.level=error"]
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        prometheus = RecordedPrometheus(address)
        try:
            until(
                lambda: _has_scrapes(prometheus), "Prometheus has scraped", else_tell=(folder / "log").read_text
            )  # fmt: skip
            yield prometheus
        finally:
            process.kill()
            exporter.shutdown()
            exporter.server_close()


def _has_scrapes(prometheus: RecordedPrometheus) -> bool:
    try:
        counts = prometheus.query("count_over_time(up[1h])")
    except OSError:  # it has not started yet
        return False
    return len(counts) == 3 and all(int(one["value"][1]) >= 4 for one in counts)
