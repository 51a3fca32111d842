"""Serving: `coatcheck serve` as a process, as an operator runs it, and what tests can observe from outside."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import grpc
import psutil

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.commands.status import as_json_object
from coatcheck.cluster.ray_cluster.process_tree import descendants
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

# Limit for the end of killed processes. Ray's agents, if they were not killed, would run for another minute.
END_SECONDS = 30.0
COMMAND = [sys.executable, "-W", "ignore", "-c", "from coatcheck.cluster.cli import main; main()"]


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


class Serving:
    """A context manager that runs `coatcheck serve`, and kills it at the end.

    `address` (gRPC) and `url` (HTTP) are set by `wait_ready`. `lines` are the lines of stderr that were read.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self.address = ""
        self.url = ""
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        assert os.environ.get("TEST_MAY_START_RAY") == "1", "mark what starts Ray: pytest.mark.ray"
        # A session of its own, so that a signal to its group is what Ctrl-C in a terminal sends.
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *self._arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=self._environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_ready(self) -> str:
        """Read stderr up to the line that says that everything serves, and return that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"^ready: .* at ([^\s,]+)(?: and (https?://[^\s,]+))?,", line):
                self.address, self.url = found[1], found[2] or ""
                return line
        raise AssertionError(f"it ended with {self.process.wait()}: {''.join(self.lines)}")

    def wait_line(self, beginning: str) -> str:
        """Read stderr up to the next line that begins with `beginning`, and return that line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"it ended with {self.process.wait()}: {''.join(self.lines)}")

    def rest(self) -> str:
        """Read stderr to its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def generate(self, prompt: str, *arguments: str) -> dict[str, Any]:
        """Run `coatcheck generate --json` and return its object."""
        done = coatcheck("generate", prompt, "--address", self.address, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

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

    def actor(self, title: str) -> int:
        """The process id of the first actor of class `title`; 0 if there is none."""
        mine = self.descendants()
        return next((pid for pid, command in mine.items() if command.startswith(f"ray::{title}")), 0)

    def descendants(self) -> dict[int, str]:
        """The command line of every process below this one, by process id."""
        return descendants(self.process.pid)


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses, without ports, at which these processes listen for TCP."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has just ended
            sockets = psutil.Process(pid).net_connections(kind="tcp")
            found |= {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return found


def kill(pid: int) -> None:
    """kill -9."""
    assert pid, "there is no such process"
    os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def still_running(processes: Mapping[int, str]) -> dict[int, str]:
    """Those of `processes` that have not ended, with their states."""
    return {pid: f"{_state(pid)} {command}" for pid, command in processes.items() if lives(pid)}


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "ended"
