"""The cluster whose processes bench/chaos.py kills: several Ray nodes on one machine, and `coatcheck serve`.

The head has no CPUs, and each other node has CPUs for one group. `coatcheck serve` only watches the cluster, so it can
be killed too.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import grpc

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import RayNodes
from coatcheck.bench.setup.servers import free_port
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

_TITLES = {"router": "RouterActor", "supervisor": "Supervisor"}


class ChaosCluster:
    """A context manager: all groups serve when it is entered, and no process is left when it exits."""

    kinds = ("rank", "rank 0", "group", "router", "supervisor", "serve", "node", "stop", "fault")

    def __init__(
        self,
        checkpoint: Path,
        scratch: Path,
        *,
        groups: int = 2,
        tp: int = 2,
        kv_memory: str = "12MiB",
        host_kv_memory: str = "48MiB",
    ) -> None:
        """`kv_memory` holds only a few long prompts, so that prefixes are often found in host memory."""
        self.groups = groups
        self.address = f"127.0.0.1:{free_port()}"
        self._tp = tp
        self._scratch = scratch
        self._ray = RayNodes(scratch)
        self.ray_address = self._ray.address
        self.environment = self._ray.environment
        port = self.address.rpartition(":")[2]
        flags = f"--groups {groups} --tp {tp} --kv-memory {kv_memory} --host-kv-memory {host_kv_memory} --dtype float32"
        flags += " --speculative-tokens 3"  # guesses differ from run to run; tokens must not
        where = f"--grpc-port {port} --http-port none --ray-address {self._ray.address}"
        self._serve_command = [str(Path(sys.executable).with_name("coatcheck")), "serve", str(checkpoint)]
        self._serve_command += f"{flags} {where}".split()
        self._channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])

    def __enter__(self) -> Self:
        self._ray.__enter__()
        try:
            for _ in range(self.groups):
                self._ray.add(self._tp)
            self.start_serve(wait_seconds=MAX_WAIT_SECONDS)
            self.wait_whole(MAX_WAIT_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        if hasattr(self, "serve"):
            self.serve.kill()
            self.serve.wait()
        self._ray.__exit__()

    def start_serve(self, wait_seconds: float = 0.0) -> None:
        """Start `coatcheck serve`, also after a kill. The command fails while nodes still join: it is tried again
        for up to `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            with (self._scratch / "serve.log").open("ab") as output:
                self.serve = subprocess.Popen(
                    self._serve_command,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **self._ray.environment},
                    start_new_session=True,
                )
            self._ray.check()
            while time.monotonic() < deadline and self.serve.poll() is None:
                if self.pids("supervisor"):
                    return
                time.sleep(0.1)
            if time.monotonic() >= deadline:
                return

    def kill_serve(self) -> None:
        """Kill the command with kill -9 and start it again."""
        if self.serve.poll() is not None:
            raise RuntimeError(f"coatcheck serve has ended by itself with {self.serve.returncode}: {self.log_tail()}")
        self.serve.kill()
        self.serve.wait()
        self.start_serve()

    def kill_node(self, pid: int) -> None:
        """Kill the node that process `pid` runs on, and add a new one."""
        for node in self._ray.nodes:
            if pid in node.processes():
                self._ray.kill(node)
                self._ray.add(self._tp, wait=False)
                return

    def add_spare(self) -> None:
        """Add a node for one more group, unless there is one already."""
        if len(self._ray.nodes) <= self.groups:
            self._ray.add(self._tp)

    def scale(self, groups: int) -> bool:
        """Run `coatcheck scale`; return whether it exited with 0."""
        command = [*self._serve_command[:1], "scale", "--groups", str(groups), "--drain-seconds", "2"]
        command += ["--ray-address", self.ray_address]
        with (self._scratch / "scale.log").open("ab") as output:
            environment = {**os.environ, **self._ray.environment}
            return not subprocess.run(
                command, stdout=output, stderr=output, env=environment, timeout=MAX_WAIT_SECONDS
            ).returncode

    def drain(self, group: str, *, undo: bool = False) -> None:
        """Drain a group, or undo that. Do nothing if no router answers."""
        with suppress(grpc.RpcError):
            request = (
                pb.DrainRequest(group=group, undo=True) if undo else pb.DrainRequest(group=group, timeout_seconds=0)
            )
            AdminStub(self._channel).Drain(request, timeout=5.0)  # type: ignore[no-untyped-call]

    def pids(self, kind: str) -> list[int]:
        """The process ids of the routers or the supervisor, whether they serve yet or not."""
        title = f"ray::{_TITLES[kind]}"
        return [pid for pid, command in self._ray.processes().items() if command.startswith(title)]

    def status(self) -> pb.StatusResponse | None:
        """The router's status; None while no router answers."""
        try:
            stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]  # made by protoc
            status: pb.StatusResponse = stub.Status(pb.StatusRequest(), timeout=2.0)
        except grpc.RpcError:
            return None
        return status

    async def host_tokens(self, request: pb.GenerateRequest) -> int:
        """The number of prompt tokens that the group that routing would choose holds in host memory."""

        def ask() -> int:
            try:
                explanation = AdminStub(self._channel).Explain(request, timeout=2.0)  # type: ignore[no-untyped-call]
            except grpc.RpcError:
                return 0
            return next((cost.host_tokens for cost in explanation.costs if cost.group == explanation.group), 0)

        return await asyncio.to_thread(ask)

    def serving(self) -> list[pb.GroupStatus]:
        """The groups that serve now and have reported their ranks."""
        status = self.status()
        return [group for group in status.groups if group.state == "serving" and group.ranks] if status else []

    def wait_whole(self, seconds: float) -> None:
        """Wait until every group serves. Start a node again if it ends by itself meanwhile. Raise TimeoutError after
        `seconds`."""
        deadline = time.monotonic() + seconds
        while len(self.serving()) < self.groups:
            self._ray.check()
            if time.monotonic() > deadline:
                message = f"the groups did not all serve within {seconds:g} s: {self.status()}"
                raise TimeoutError(f"{message}\n{self.log_tail()}")
            time.sleep(0.1)

    def log_tail(self) -> str:
        """The last 2000 characters that `coatcheck serve` has printed."""
        return (self._scratch / "serve.log").read_text()[-2000:]
