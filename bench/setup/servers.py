"""A server that a benchmark starts, loads and ends; and ours. peers.py has those of others.

A run finds no prefix of an earlier run: each has a seed of its own, and over gRPC also a salt. Requests of one run
may share prefixes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.scenario import Figures, Scenario
from coatcheck.bench.setup.sse_load import run_scenario
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

KV_GIB = 2
_GRPC_SEEDS = 1 << 20  # added to the seeds of runs over gRPC


class BenchEngine(ABC):
    """What a scenario runs on. A context manager."""

    name: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self) -> None:
        """End its processes."""

    @abstractmethod
    def run(self, scenario: Scenario, seed: int) -> Figures:
        """Run a scenario once. Runs with different seeds share no prompt."""


class Server(BenchEngine):
    """A server process in a new session, so that SIGKILL can reach its children too."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        started = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}, start_new_session=True
            )
        try:
            self._wait_until_ready(started + MAX_WAIT_SECONDS)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_ready = time.perf_counter() - started

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if that does not end the server."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers requests."""

    def _wait_until_ready(self, deadline: float) -> None:
        while not self.is_ready():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"{self.name} did not become ready:\n{last}")
            time.sleep(0.1)


class OpenAiServer(Server):
    """A server with OpenAI's HTTP API at `http_address`, "host:port"."""

    http_address: str

    def run(self, scenario: Scenario, seed: int) -> Figures:
        return run_scenario(self.http_address, scenario, seed)


class CoatcheckServer(OpenAiServer):
    """`coatcheck serve`. Scenarios load it over HTTP, and CoatcheckGrpc over gRPC."""

    name = "coatcheck"

    def __init__(self, checkpoint: Path, scratch: Path, flags: str = f"--kv-memory {KV_GIB}GiB") -> None:
        self._command = Path(sys.executable).with_name("coatcheck")
        self.address = f"127.0.0.1:{free_port()}"
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self.http_address = f"127.0.0.1:{free_port()}"
        ports = [address.rpartition(":")[2] for address in (self.address, self.http_address)]
        words = f"--groups 1 --tp 1 --grpc-port {ports[0]} --http-port {ports[1]} {flags}".split()
        super().__init__([self._command, "serve", checkpoint, *words], scratch / "coatcheck.log")

    def is_ready(self) -> bool:
        try:
            stub: Any = AdminStub(self.channel)  # type: ignore[no-untyped-call]  # made by protoc
            return bool(stub.Status(pb.StatusRequest(), timeout=2.0).state == "serving")
        except grpc.RpcError:
            return False

    def status(self) -> pb.GroupStatus:
        """The status of the first group."""
        return self.group_statuses()[0]

    def group_statuses(self) -> list[pb.GroupStatus]:
        """The status of every group."""
        stub: Any = AdminStub(self.channel)  # type: ignore[no-untyped-call]  # made by protoc
        return list(stub.Status(pb.StatusRequest(), timeout=10.0).groups)

    def run_bench(self, flags: str) -> dict[str, Any]:
        """The report of `coatcheck bench` with these flags. Raises RuntimeError if a request was not answered."""
        command: list[str | Path] = [self._command, "bench", "--address", self.address, "--json", *flags.split()]
        report: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        if report["succeeded"] != report["requests"]:
            raise RuntimeError(f"not every request was answered: {report['errors']}")
        return report

    def stop(self) -> None:
        self.channel.close()
        super().stop()


class CoatcheckGrpc(BenchEngine):
    """A server of ours, loaded over gRPC by `coatcheck bench`."""

    name = "coatcheck gRPC"

    def __init__(self, server: CoatcheckServer) -> None:
        self._server = server

    def stop(self) -> None:
        """The server ends by itself."""

    def run(self, scenario: Scenario, seed: int) -> Figures:
        # The warm-up request has the next seed and no salt. It must not be the first request of a later run over HTTP.
        flags = f"--concurrency {scenario.clients} --num-requests {scenario.requests} --seed {_GRPC_SEEDS + seed}"
        flags += f" --input-len {scenario.input_len} --output-len {scenario.output_len}"
        if scenario.prefixes:
            flags += f" --prompts shared-prefix --num-prefixes {scenario.prefixes} --prefix-len {scenario.prefix_len}"
        report = self._server.run_bench(flags)
        return Figures(report["ttft_ms"]["p50"], report["tpot_ms"]["p50"], report["output_tokens_per_second"])


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
