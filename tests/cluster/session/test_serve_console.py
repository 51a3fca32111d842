"""The lines of `coatcheck serve` where they cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
from coatcheck.cluster.session.serve_console import ServeConsole, discard_stderr
console = ServeConsole()
console.print("one")
console.print("two")
discard_stderr()
"""


def run_program(stderr: int) -> int:
    """The exit code of a process that prints two lines to `stderr`."""
    return subprocess.run([sys.executable, "-c", _PROGRAM], stderr=stderr).returncode


def test_a_full_disk_ends_nothing() -> None:
    """Lines that a full disk refuses are lost, and the process ends with 0."""
    with Path("/dev/full").open("w") as full:
        assert run_program(full.fileno()) == 0


def test_a_reader_that_leaves_ends_nothing() -> None:
    """Lines to a pipe that nobody reads are lost, and the process ends with 0."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_program(writer) == 0
    finally:
        os.close(writer)
