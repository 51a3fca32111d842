"""Serving: `coatcheck serve` as a process, as an operator runs it, and what may be seen of it from outside."""

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from coatcheck.bench.setup.patience import PATIENCE_SECONDS
from coatcheck.cluster.commands.status import as_json_object
from coatcheck.cluster.ray_cluster.process_tree import descendants
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

# A process that was killed with the command ends when the kernel gets to it; Ray's own agents go on for a minute.
END_SECONDS = 30.0
COMMAND = [sys.executable, "-W", "ignore", "-c", "from coatcheck.cluster.cli import main; main()"]


def coatcheck(
    *arguments: str, seconds: float = PATIENCE_SECONDS, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command run to its end."""
    env = {**os.environ, **(environment or {})}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=seconds, env=env)


def until(
    holds: Callable[[], bool],
    what: str,
    seconds: float = PATIENCE_SECONDS,
    *,
    else_tell: Callable[[], object] = lambda: "",
) -> None:
    """Polls until it holds; `else_tell`: what is to be known where it does not."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s {else_tell()}"
        time.sleep(0.1)


class Serving:
    """A context manager; `address` is there once it is ready."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        self.address = ""
        self.url = ""  # of its HTTP
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        assert "PYTEST_XDIST_WORKER" not in os.environ, "what starts Ray is marked so: pytest.mark.ray"
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
        """The one line that it prints when all serve."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"^ready: .* at ([^\s,]+)(?: and (https?://[^\s,]+))?,", line):
                self.address, self.url = found[1], found[2] or ""
                return line
        raise AssertionError(f"it ended with {self.process.wait()}: {''.join(self.lines)}")

    def wait_line(self, beginning: str) -> str:
        """The next line that begins so, once it prints one."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith(beginning):
                return line
        raise AssertionError(f"it ended with {self.process.wait()}: {''.join(self.lines)}")

    def rest(self) -> str:
        """What it prints from here to its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def generate(self, prompt: str, *arguments: str) -> dict[str, Any]:
        """One answer, as `generate --json` prints it."""
        done = coatcheck("generate", prompt, "--address", self.address, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def status(self) -> dict[str, Any]:
        """As `status --json` prints it, without the half second of a core that a new process takes to ask; once every
        group that serves has said who its ranks are."""
        answer: dict[str, Any] = {}

        def is_whole() -> bool:
            answer.update(as_json_object(stub.Status(pb.StatusRequest(), timeout=PATIENCE_SECONDS)))
            return all(group["ranks"] for group in answer["groups"] if group["state"] == "serving")

        with grpc.insecure_channel(self.address) as channel:
            stub: Any = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
            until(is_whole, "groups say who their ranks are")
        return answer

    def group(self, name: str) -> dict[str, Any]:
        """One group's status; empty while the router does not answer."""
        try:
            groups = self.status()["groups"]
        except grpc.RpcError:
            return {}
        return next((group for group in groups if group["name"] == name), {})

    def wait_idle(self) -> None:
        """Until no group reports a running request: what they last said may be of the one before."""
        until(lambda: not any(group["running"] for group in self.status()["groups"]), "nothing runs")

    def wait_running(self) -> dict[str, Any]:
        """The one group that reports running requests, once it does."""
        found: list[dict[str, Any]] = []

        def runs() -> bool:
            found[:] = [group for group in self.status()["groups"] if group["running"]]
            return len(found) == 1

        until(runs, "the stream runs")
        return found[0]

    def actor(self, title: str) -> int:
        """The process of an actor of this cluster, by its class; 0 when there is none."""
        mine = self.descendants()
        return next((pid for pid, command in mine.items() if command.startswith(f"ray::{title}")), 0)

    def descendants(self) -> dict[int, str]:
        """Every process below this one, with its command line."""
        return descendants(self.process.pid)


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses, without ports, at which these processes listen for TCP."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                words = bytes.fromhex(fields[1].partition(":")[0])  # each of four bytes is turned round
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(raw))
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # it has just been closed
                found.add(addresses.get(os.readlink(descriptor), ""))
    return found - {""}


def kill(pid: int) -> None:
    """kill -9."""
    assert pid, "there is no such process"
    os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def still_running(processes: Mapping[int, str]) -> dict[int, str]:
    """Those that have not ended; each with what it waits for, if for the kernel."""
    return {
        pid: f"{_read(pid, 'wchan')} {_read(pid, 'stat').rpartition(')')[2][:40]} {command}"
        for pid, command in processes.items()
        if lives(pid)
    }


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text()
    except OSError:
        return ""
