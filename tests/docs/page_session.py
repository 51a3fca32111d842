"""PageSession: types a page's commands into shells, as its reader would, in a copy of the repository.

`coatcheck serve` stays in a terminal of its own, and the commands after it wait for its `ready:` line. What `export`
and `.` (the shell's) change holds for all later commands. It knows no page.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

from tests.docs.own_network import OwnNetwork

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 900.0  # of a machine that is busy with other things
_LEFT_OUT = (".*", "__pycache__", "build", "*.egg-info", "env")


class PageSession:
    """A context manager, which ends what still serves."""

    def __init__(self, network: OwnNetwork, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self._prelude: list[str] = []
        self._server: subprocess.Popen[str] | None = None
        self._server_lines: list[str] = []
        self._follower: threading.Thread | None = None
        self._ready = threading.Event()
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for name in (".venv", "env"):  # what the pages call the environment that they have the reader make
            (folder / name).symlink_to(sys.prefix)
        # Short, for the sake of Ray's sockets.
        self._ray = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        beside = str(Path(sys.executable).parent)
        path = [part for part in os.environ["PATH"].split(":") if part != beside]
        removed = {"COLUMNS", "COATCHECK_API_KEY", "VIRTUAL_ENV", "PYTHONPATH"}
        self._environment = {name: value for name, value in os.environ.items() if name not in removed}
        self._environment |= {"PATH": ":".join(path), "RAY_TMPDIR": str(self._ray)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        if self._follower is not None:
            self._follower.join()
        shutil.rmtree(self._ray, ignore_errors=True)

    def assume(self, line: str) -> None:
        """Shell that holds for all later commands, in the place of a command that is not run."""
        self._prelude.append(line)

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs one command to its end, or starts the server; raises AssertionError where that is not ready."""
        words = command.split()
        if words[0] in ("export", "."):
            self._prelude.append(command)
        if words[:2] == ["coatcheck", "serve"]:
            self._serve(command)
            return subprocess.CompletedProcess([], 0, "", "")
        return subprocess.run(
            self._shell(command),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )

    def interrupt_server(self) -> int | None:
        """Ctrl-C in its terminal, and its exit code; None where nothing serves."""
        if self._server is None:
            return None
        os.killpg(self._server.pid, signal.SIGINT)
        code = self._server.wait(COMMAND_SECONDS)
        self._server = None
        return code

    def _shell(self, command: str) -> list[str]:
        return self._network.inside("bash", "-c", "\n".join([*self._prelude, command]))

    def _serve(self, command: str) -> None:
        assert self._server is None, f"something serves already; end it before {command!r}"
        self._ready.clear()
        self._server = subprocess.Popen(
            self._shell(f"exec {command}"),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._follower = threading.Thread(target=self._follow, args=[self._server], daemon=True)
        self._follower.start()
        assert self._ready.wait(COMMAND_SECONDS), f"not ready in time: {''.join(self._server_lines)}"
        assert any(line.startswith("ready:") for line in self._server_lines), "".join(self._server_lines)

    def _follow(self, server: subprocess.Popen[str]) -> None:
        assert server.stderr is not None
        with server.stderr:
            for line in server.stderr:
                self._server_lines.append(line)
                if line.startswith("ready:"):
                    self._ready.set()
        self._ready.set()  # it has ended; nobody needs to wait for it
