"""The cluster that bench/chaos.py strikes: a Ray of its own, `coatcheck serve` upon it, and the process of every part.

The command only watches a Ray that was there before it, so that it too can be killed. It does not know streams.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import grpc

from coatcheck.bench.servers import free_port
from coatcheck.proto import coatcheck_pb2 as pb
from coatcheck.proto.coatcheck_pb2_grpc import AdminStub

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


class ChaosCluster:
    """A context manager that has everything serving when it is entered, and leaves no process."""

    def __init__(self, checkpoint: Path, scratch: Path, *, groups: int = 2, tp: int = 2) -> None:
        self.groups = groups
        self.address = f"127.0.0.1:{free_port()}"
        self._ray = f"127.0.0.1:{free_port()}"
        self._scratch = scratch
        port = self.address.rpartition(":")[2]
        flags = f"--groups {groups} --tp {tp} --kv-memory 32MiB --grpc-port {port} --ray-address {self._ray}".split()
        self._serve_command = [str(_command("coatcheck")), "serve", str(checkpoint), *flags, "--dtype", "float32"]
        ray_flags = f"--head --block --port={self._ray.rpartition(':')[2]} --num-cpus={groups * tp}".split()
        self._ray_command = [str(_command("ray")), "start", *ray_flags, "--include-dashboard=false"]
        self._channel = grpc.insecure_channel(self.address, options=[("grpc.max_reconnect_backoff_ms", 200)])

    def __enter__(self) -> Self:
        self._head = self._start(self._ray_command, "ray.log")
        try:
            while not _listens(self._ray):
                if self._head.poll() is not None:
                    raise RuntimeError(f"Ray did not start: {(self._scratch / 'ray.log').read_text()}")
                time.sleep(0.1)
            self.start_serve()
            self.wait_whole(120.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        processes = self._descendants()
        if hasattr(self, "serve"):
            self.serve.kill()
            self.serve.wait()
        os.killpg(self._head.pid, signal.SIGKILL)
        self._head.wait()
        for pid in processes:  # workers too that have left the session
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def start_serve(self) -> None:
        """The command, for the first time or again after it was killed; returns at once."""
        self.serve = self._start(self._serve_command, "serve.log")

    def status(self) -> pb.StatusResponse | None:
        """None while no router answers."""
        try:
            stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]  # made by protoc
            status: pb.StatusResponse = stub.Status(pb.StatusRequest(), timeout=2.0)
        except grpc.RpcError:
            return None
        return status

    def serving(self) -> list[pb.GroupStatus]:
        """The groups that serve now."""
        status = self.status()
        return [group for group in status.groups if group.state == "serving"] if status else []

    def wait_whole(self, seconds: float) -> None:
        """Until every group serves; raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while len(self.serving()) < self.groups:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the groups did not all serve within {seconds:g} s: {self.status()}")
            time.sleep(0.1)

    def actors(self, title: str) -> list[int]:
        """The processes of an actor's class, whether they serve yet or not."""
        return [pid for pid, command in self._descendants().items() if command.startswith(f"ray::{title}")]

    def _start(self, command: list[str], log: str) -> "subprocess.Popen[bytes]":
        with (self._scratch / log).open("ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **_ENVIRONMENT}, start_new_session=True
            )

    def _descendants(self) -> dict[int, str]:
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue  # it has just ended
                children.setdefault(parent, []).append(int(entry.name))
        found, pending = {}, [self._head.pid]
        while pending:
            for pid in children.get(pending.pop(), []):
                pending.append(pid)
                try:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
        return found


def _command(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def _listens(address: str) -> bool:

    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
