"""RunningServer: what tests ask a server through its gRPC port and the commands, whatever process runs it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Unpack

import grpc

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client.client import Client
from coatcheck.cluster.client.request_builder import SamplingOptions
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.cluster.commands.status import as_json_object
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

# -P: as the `coatcheck` script, which does not import from the current directory.
COMMAND = [sys.executable, "-P", "-W", "ignore", "-c", "from coatcheck.cluster.cli import main; main()"]


def coatcheck(
    *arguments: str, seconds: float = MAX_WAIT_SECONDS, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a `coatcheck` command to its end."""
    env = {**os.environ, **(environment or {})}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=seconds, env=env)


def until(
    holds: Callable[[], bool],
    what: str,
    seconds: float = MAX_WAIT_SECONDS,
    *,
    else_tell: Callable[[], object] = lambda: "",
) -> None:
    """Poll `holds` until it returns True. Fails after `seconds`, with the result of `else_tell`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s {else_tell()}"
        time.sleep(0.1)


class RunningServer:
    """`address` (gRPC) and `url` (HTTP) are empty until the server runs."""

    def __init__(self) -> None:
        self.address = ""
        self.url = ""

    def generate(self, prompt: str, **options: Unpack[SamplingOptions]) -> GenerationResult:
        """Send one request with the Python client."""
        with Client(self.address) as client:
            return client.generate(prompt, timeout=MAX_WAIT_SECONDS, **options)

    def status(self) -> dict[str, Any]:
        """What `coatcheck status --json` prints, without a new process, which needs half a second of CPU time. Waits
        until every serving group has reported its ranks."""
        answer: dict[str, Any] = {}

        def is_whole() -> bool:
            answer.update(as_json_object(stub.Status(pb.StatusRequest(), timeout=MAX_WAIT_SECONDS)))
            return all(group["ranks"] for group in answer["groups"] if group["state"] == "serving")

        with grpc.insecure_channel(self.address) as channel:
            stub: Any = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
            until(is_whole, "groups say who their ranks are")
        return answer

    def group(self, name: str) -> dict[str, Any]:
        """The status of one group; empty while the router does not answer."""
        try:
            groups = self.status()["groups"]
        except grpc.RpcError:
            return {}
        return next((group for group in groups if group["name"] == name), {})

    def wait_idle(self) -> None:
        """Wait until no group reports a running request."""
        until(lambda: not any(group["running"] for group in self.status()["groups"]), "nothing runs")

    def wait_running(self) -> dict[str, Any]:
        """Wait until exactly one group reports running requests, and return its status."""
        found: list[dict[str, Any]] = []

        def runs() -> bool:
            found[:] = [group for group in self.status()["groups"] if group["running"]]
            return len(found) == 1

        until(runs, "the stream runs")
        return found[0]
