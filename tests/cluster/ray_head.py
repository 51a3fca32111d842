"""RayHead: a Ray of a test's own, which was there before `coatcheck serve`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.serving import until

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as docs/gpu-hosts.md has it: else a start takes minutes beside other work
}


@dataclass(frozen=True)
class RayHead:
    """Where it listens, and the session of its processes."""

    address: str
    session: int

    def actor(self, title: str) -> int:
        """The process of an actor that runs on it, by its class; 0 when there is none."""
        for entry in Path("/proc").iterdir():
            try:
                if not (entry.name.isdigit() and os.getsid(int(entry.name)) == self.session):
                    continue
                if (entry / "cmdline").read_text().startswith(f"ray::{title}"):
                    return int(entry.name)
            except OSError:
                continue  # it has just ended
        return 0


@contextmanager
def ray_head(cpus: int) -> Iterator[RayHead]:
    """In processes of its own, which end with it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--head", "--block", f"--port={port}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    command = [str(Path(sys.executable).parent / "ray"), "start", *options]
    head = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: _listens(port), "the Ray head listens")
        yield RayHead(f"127.0.0.1:{port}", head.pid)
    finally:
        # Its processes share its group, and what they have started ends with them; `ray stop` would end every Ray here.
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
