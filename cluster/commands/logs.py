"""`coatcheck logs`: prints what the ranks, the routers and the supervisor of this host have logged.

Ray writes the output of each process to two files in the folder of its session. Without Ray, `coatcheck serve` writes a
file for each process to a folder that it names when it starts. In a pod, `kubectl logs` shows the standard output of
containers and not those files; the chart runs this command beside them.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from coatcheck.proto.errors import NotFound

_POLL_SECONDS = 0.5
# The files of actors (those of Ray's own processes have other names), and of the router and the ranks without Ray.
_PATTERNS = ("worker-*.*", "router.log", "*-rank-*.log")
_CHUNK_BYTES = 2**20


def logs(
    folder: Annotated[
        Path, typer.Option(help="The folder with Ray's logs, or the one that `serve --no-ray` has named.")
    ] = Path("/tmp/ray/session_latest/logs"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print what comes later, until SIGTERM.")] = False,
) -> None:
    """Print the logs of this host's ranks, routers and supervisor, also of those that have ended.

    Without --follow, one file after another. With --follow, lines in the order in which they are written; the folder
    need not exist yet.
    """
    reader = LogFolder(folder)
    if not follow and not reader.files():
        raise NotFound(
            f"there are no logs in {folder}; give the folder that `coatcheck serve` has named as --folder, or "
            "session_latest/logs in the RAY_TMPDIR of its Ray"
        )
    while True:
        for line in reader.read_lines(whole=not follow):
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
        if not follow:
            return
        time.sleep(_POLL_SECONDS)


class LogFolder:
    """Reads new lines of the log files in a folder. The folder need not exist yet, and may be a link that changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[Path, int] = {}  # bytes that were read of each file

    def read_lines(self, *, whole: bool) -> Iterator[bytes]:
        """The lines that came since the last call, each with its newline. `whole`: also a last line without one."""
        for file in self.files():
            yield from self._read_file(file, whole)

    def files(self) -> list[Path]:
        """The log files, by name. When Ray starts again, the link leads to another folder."""
        folder = self._folder.resolve()
        return sorted(file for pattern in _PATTERNS for file in folder.glob(pattern))

    def _read_file(self, file: Path, whole: bool) -> Iterator[bytes]:
        position = self._positions.get(file, 0)
        try:
            with file.open("rb") as opened:
                opened.seek(position)
                while lines := opened.readlines(_CHUNK_BYTES):
                    for line in lines:
                        if not line.endswith(b"\n"):
                            if not whole:
                                return
                            line += b"\n"
                        yield line
                        self._positions[file] = self._positions.get(file, 0) + len(line)
        except FileNotFoundError:
            return  # it was deleted meanwhile
