"""A real Ray that cannot start: its raylet's helper processes sleep, as on a machine that is too busy for them.

By itself the raylet waits 15 s for them and ends itself; Ray's driver waits 30 s for the raylet.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Python imports a module of this name at its start. The helper processes of a raylet are all called agents.
_SITECUSTOMIZE = """\
import os, sys, time
if any("agent" in argument for argument in sys.orig_argv):
    while not os.path.exists({mended!r}):
        time.sleep(0.1)
"""


@dataclass(frozen=True)
class SlowRay:
    """`environment` makes every Ray that is started with it a slow one, until `mend`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder), "RAY_TMPDIR": str(self.folder)}

    def mend(self) -> None:
        """From now on agents start at once, and those that sleep continue."""
        (self.folder / "mended").touch()

    def processes(self) -> dict[int, str]:
        """All processes that use this folder, whatever their parent."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if entry.name.isdigit() and f"{self.folder}/ray" in command:
                found[int(entry.name)] = command
        return found


@contextmanager
def slow_ray() -> Iterator[SlowRay]:
    """Its folder is in /tmp, because the path of a socket must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name:
        slow = SlowRay(Path(name))
        (slow.folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(mended=str(slow.folder / "mended")))
        yield slow
        slow.mend()
