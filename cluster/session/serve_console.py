"""ServeConsole: the lines of `coatcheck serve` on stderr. A line that cannot be written is lost, and `serve` goes on.

The reader of a pipe may end, and the disk of a file may be full. Rich would end the process at the first such line, and
with the process all streams of clients.
"""

import contextlib
import os
import sys

from rich.console import Console


class ServeConsole(Console):
    """A console on stderr. A line that cannot be written is dropped, and serving goes on."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Print nothing from now on: a pipe's reader does not return."""
        self.quiet = True
        discard_stderr()

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]


def discard_stderr() -> None:
    """Redirect stderr to /dev/null if it cannot be written, so that Python's flush at exit succeeds."""
    try:
        sys.stderr.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
