"""ServeConsole: prints the lines of `coatcheck serve` to stderr, and drops those that cannot be written.

A write fails if the reader of the pipe has ended, or if the disk is full. Rich would then end the process, and with it
all streams of clients.
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
