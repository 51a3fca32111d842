"""A real Ray that cannot start: its raylet's helper processes sleep, as on a machine that is too busy for them.

By itself the raylet waits 15 s for them and ends itself; Ray's driver waits 30 s for the raylet.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# Python imports a module of this name at its start. The helper processes of a raylet are all called agents.
_SITECUSTOMIZE = """\
import os, sys, time
if any("agent" in argument for argument in sys.orig_argv):
    while not os.path.exists({mended!r}):
        time.sleep(0.1)
"""


@dataclass(frozen=True)
class SlowRay:
    """A Ray that is started with `environment` is slow until `mend_agents` is called."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder), "RAY_TMPDIR": str(self.folder)}

    def mend_agents(self) -> None:
        """Let the agents that sleep continue, and new ones start at once."""
        (self.folder / "mended").touch()

    def processes(self) -> dict[int, str]:
        """The command line of every process that uses this folder, by process id."""
        everything = psutil.process_iter(["cmdline"])
        commands = {process.pid: " ".join(process.info["cmdline"] or []) for process in everything}
        return {pid: command for pid, command in commands.items() if f"{self.folder}/ray" in command}


@contextmanager
def slow_ray() -> Iterator[SlowRay]:
    """A SlowRay in a new folder of /tmp, because the path of a socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        slow = SlowRay(Path(name))
        (slow.folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(mended=str(slow.folder / "mended")))
        yield slow
        slow.mend_agents()
