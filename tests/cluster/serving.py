"""Serving: `coatcheck serve` as a process, as an operator runs it, and what tests can observe from outside."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import psutil

from coatcheck.cluster.ray_cluster.process_tree import descendants
from tests.cluster.running_server import COMMAND, RunningServer

# Limit for the end of killed processes. Ray's agents, if they were not killed, would run for another minute.
END_SECONDS = 30.0


class Serving(RunningServer):
    """A context manager that runs `coatcheck serve`, and kills it at the end.

    `address` (gRPC) and `url` (HTTP) are set by `wait_ready`. `lines` are the lines of stderr that were read.
    """

    def __init__(
        self, *arguments: str, environment: dict[str, str] | None = None, directory: Path | None = None
    ) -> None:
        """`directory`: where the command runs. Default: the current one."""
        self._arguments = arguments
        self._directory = directory
        self._environment = {**os.environ, **(environment or {})}
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        may_start_ray = os.environ.get("TEST_MAY_START_RAY") == "1"
        assert may_start_ray or "--no-ray" in self._arguments, "mark what starts Ray: pytest.mark.ray"
        # A session of its own, so that a signal to its group is what Ctrl-C in a terminal sends.
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *self._arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=self._environment,
            cwd=self._directory,
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
