"""Output of C++ code on file descriptor 2 does not reach the terminal."""

import os
import stat
import sys
from pathlib import Path

import pytest

from coatcheck.cluster.ray_cluster.ray_log import redirect_native_stderr


def test_native_lines_go_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """While redirected, the terminal shows only Python's output, and the rest goes to a private file; then all is
    restored."""
    with redirect_native_stderr(tmp_path):
        os.write(2, b"raw\n")
        print("ours", file=sys.stderr)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "ours\nafter\n"
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "raw\n" and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_folder_native_lines_are_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If no file can be created, the command's own output still reaches the terminal."""
    with redirect_native_stderr(tmp_path / "gone"):
        os.write(2, b"raw\n")
        print("ours", file=sys.stderr)
    assert capfd.readouterr().err == "ours\n"
