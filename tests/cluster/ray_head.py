"""RayHead: a Ray cluster that a test starts before `coatcheck serve`, which then joins it."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from coatcheck.bench.setup.ray_nodes import RayNode

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as docs/gpu-hosts.md has it: else a start takes minutes beside other work
}


@dataclass(frozen=True)
class RayHead:
    """`address` of its GCS, and the id of the `session` of its processes."""

    address: str
    session: int

    def actor(self, title: str) -> int:
        """The process id of the first actor of class `title`; 0 if there is none."""
        return next((pid for pid, command in self._processes() if command.startswith(f"ray::{title}")), 0)

    def program(self, name: str) -> int:
        """The process id of one of Ray's own programs; 0 if it does not run."""
        return next((pid for pid, command in self._processes() if os.path.basename(command.split(" ")[0]) == name), 0)

    def _processes(self) -> Iterator[tuple[int, str]]:
        """(process id, command line) of each process of the session."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):  # it has just ended
                if os.getsid(process.pid) == self.session:
                    yield process.pid, " ".join(process.cmdline())


@contextmanager
def ray_head(cpus: int, environment: Mapping[str, str] = ENVIRONMENT) -> Iterator[RayHead]:
    """A Ray head with `cpus` logical CPUs. Its processes are killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--head", "--block", f"--port={port}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    command = [str(Path(sys.executable).parent / "ray"), "start", *options]
    # `ray start` fails in /tmp/ray if another user has a Ray there. Short, for the sake of Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        head = RayNode(command, {"RAY_TMPDIR": scratch, **environment}, Path(scratch, "ray.log"))
        try:
            head.wait_started()
            yield RayHead(f"127.0.0.1:{port}", head.pid)
        finally:
            head.kill()
            # Its processes share its group, and what they have started ends with them; `ray stop` would end every Ray
            # of this machine.
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
