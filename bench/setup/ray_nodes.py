"""RayNodes: a Ray cluster on this machine. Each node is a `ray start --block` that can be killed with its processes.

Every node is 127.0.0.1 and has resources of its own.
"""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.servers import free_port
from coatcheck.cluster.ray_cluster.process_tree import descendants

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # A lost node is detected after about five seconds instead of half a minute. A node that is merely slow on a busy
    # machine is not taken for lost: it fails only after ten health checks of two seconds each.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "10",
}
_ALIVE = 0  # GcsNodeInfo.ALIVE
# In the output of `ray start` on a busy machine: its processes have not started within 30 s, or the raylet has ended
# because its agents have not started within 15 s. Neither limit has a setting.
_GAVE_UP = ("timed out during startup", "subprocesses exited unexpectedly")


class RayNode:
    def __init__(
        self, command: list[str], environment: Mapping[str, str], log: Path, *, remove_first: Path | None = None
    ) -> None:
        """`remove_first`: a file that is removed before each start."""
        self._command, self._environment, self._log = command, {**os.environ, **environment}, log
        self._remove_first = remove_first
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process id of `ray start`, which leads the node's process group."""
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of the node, by process id."""
        return descendants(self._process.pid)

    def kill(self) -> None:
        """Kill all processes of the node with kill -9, as a power failure would."""
        if self._process.poll() is not None and self._process.returncode == -signal.SIGKILL:
            return
        for pid in [self._process.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def runs(self) -> bool:
        """False once `ray start` has ended."""
        return self._process.poll() is None

    def wait_started(self) -> None:
        """Wait until the node has started; raise RuntimeError if it ends instead, TimeoutError if it takes too long."""
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while "Ray runtime started" not in self._log.read_text():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"a Ray node does not start: {self.log_tail()}")
            time.sleep(0.05)

    def log_tail(self) -> str:
        """The last lines that `ray start` has printed."""
        return self._log.read_text()[-2000:]

    def check(self) -> None:
        """Restart the node if `ray start` gave up on a busy machine. Raise RuntimeError if it ended otherwise."""
        if self.runs():
            return
        if not any(text in self.log_tail() for text in _GAVE_UP):
            raise RuntimeError(f"a Ray node ended with {self._process.returncode}: {self.log_tail()}")
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it left behind
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._remove_first is not None:
            self._remove_first.unlink(missing_ok=True)
        with self._log.open("wb") as output:
            return subprocess.Popen(
                self._command, stdout=output, stderr=output, env=self._environment, start_new_session=True
            )


class RayNodes:
    """A context manager that starts a head with `head_cpus` CPUs and kills all nodes at its exit."""

    def __init__(self, scratch: Path, *, head_cpus: int = 0, environment: Mapping[str, str] | None = None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[RayNode] = []
        self.environment = {**ENVIRONMENT, **(environment or {})}
        self._scratch = scratch
        # The path is short because it contains sockets.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._head_cpus = head_cpus
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        try:
            self.start_head()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self.nodes:
            self.kill(self.nodes[-1])
        if hasattr(self, "head"):
            self.head.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start_head(self) -> None:
        """Start the head, or start it again at the same address."""
        port = self.address.rpartition(":")[2]
        flags = [f"--port={port}", f"--num-cpus={self._head_cpus}", f"--temp-dir={self._folder}"]
        # Ray refuses to start while nodes that wait for a head still name its address; it only checks if this file
        # exists.
        note = Path(self._folder) / "ray_current_cluster"
        self.head = self._start("--head", "--include-dashboard=false", *flags, remove_first=note)
        self.head.wait_started()

    def add(self, cpus: int, resources: Mapping[str, float] | None = None, *, wait: bool = True) -> RayNode:
        """Add a node. Without `wait`, add no other node before this one has started: two nodes that start at once on
        one machine choose the same socket name."""
        named = json.dumps(dict(resources or {}))
        node = self._start(f"--address={self.address}", f"--num-cpus={cpus}", f"--resources={named}")
        self.nodes.append(node)
        if wait:
            node.wait_started()
        return node

    def kill(self, node: RayNode) -> None:
        """Kill a node with all its processes."""
        self.nodes.remove(node)
        node.kill()

    def check(self) -> None:
        """Raise RuntimeError if a node has ended by itself."""
        for node in [*self.nodes, self.head]:
            node.check()

    def count(self) -> int:
        """The number of nodes that are alive to Ray's head, itself included; raise RuntimeError if one has ended."""
        self.check()
        return int(self._ask(f"print(sum(node.state == {_ALIVE} for node in gcs.get_all_node_info().values()))"))

    def pretend(self, metadata: Mapping[str, str]) -> None:
        """Set the versions that the head reports to nodes and drivers that join from now on."""
        self._ask(f"gcs.internal_kv_put(b'CLUSTER_METADATA', {json.dumps(metadata).encode()!r}, True, b'cluster')")

    def processes(self) -> dict[int, str]:
        """The command lines of the processes of all nodes, by process id."""
        found: dict[int, str] = {}
        for node in [*self.nodes, self.head]:
            found |= node.processes()
        return found

    def _ask(self, code: str) -> str:
        """Run `code` with a GcsClient `gcs` in a new process, so that this one does not load Ray. Return its output."""
        client = f"from ray._raylet import GcsClient; gcs = GcsClient(address={self.address!r}); "
        command = [sys.executable, "-c", client + code]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=self._env()).stdout

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def _start(self, *flags: str, remove_first: Path | None = None) -> RayNode:
        plain = ["--block", "--node-ip-address=127.0.0.1", "--object-store-memory=83886080"]
        agent = f"--dashboard-agent-listen-port={free_port()}"
        command = [str(Path(sys.executable).with_name("ray")), "start", *plain, agent, *flags]
        log = self._scratch / f"ray-{next(self._numbers)}.log"
        return RayNode(command, self.environment, log, remove_first=remove_first)


def listens(address: str) -> bool:
    """Whether a process listens at the address."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
