"""Ray's logs: finds the line that says why Ray did not start, and redirects Ray's C++ output to a file among them.

Ray's exception only names a timeout. The cause is in the logs of the raylet (the process that manages one node) or of
the GCS (the cluster's control store). This module does not import Ray.
"""

import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from coatcheck.workers.host.safe_files import create_file

# Files to search, in this order. A raylet that ends itself writes why into both of its files.
_FILES: Final = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_TAIL_BYTES: Final = 256 << 10
_LINE: Final = re.compile(r"\[\S+ \S+ (?P<level>[A-Z]) \d+ \d+\] \((?P<process>\w+)\) \S+:\d+:\s+(?P<text>.*)")
_ERROR_LEVELS: Final = "FCE"  # fatal, critical, error
# Ray puts this sentence before the message of every failed check.
_BOILERPLATE: Final = re.compile(r"An unexpected system state has occurred\..*?we'll work with you to fix it\.\s*")
_MAX_CHARS: Final = 400


def find_session(folder: Path, pid: int) -> Path | None:
    """The folder of the newest session that process `pid` has started; None if there is none. `folder`: Ray's."""
    # Ray names a session folder by its time and the process that started it. Every user may write to Ray's folder.
    sessions = [session for session in folder.glob(f"session_*_{pid}") if _is_own_folder(session)]
    return max(sessions, default=None, key=lambda session: session.name)


def _is_own_folder(folder: Path) -> bool:
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def last_error(session: Path) -> str:
    """The last line of level error or worse, without its header (time, level, process ids, source file); "" if there is
    none."""
    return _last_match(session, _ERROR_LEVELS)


def last_line(session: Path) -> str:
    """The last line of any level, without its header; "" if there is none."""
    return _last_match(session, "")


def _last_match(session: Path, levels: str) -> str:
    for name in _FILES:
        found = [line for line in _tail(session / "logs" / name) if not levels or line["level"] in levels]
        if found:
            text = " ".join(_BOILERPLATE.sub("", found[-1]["text"]).split())
            return f"{found[-1]['process']}: {text}"[:_MAX_CHARS]
    return ""


def _tail(file: Path) -> list[re.Match[str]]:
    """The lines in Ray's format in the file's last 256 KiB; none unless it is a regular file. Every user may write to
    Ray's folder, so links are not followed and a FIFO does not block."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return []
        opened.seek(max(0, about.st_size - _TAIL_BYTES))
        lines = opened.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    return [found for line in lines if (found := _LINE.match(line))]


@contextmanager
def redirect_native_stderr(logs: Path) -> Iterator[None]:
    """While inside, redirect file descriptor 2, where C++ code of Ray and gRPC writes, to a new file in the folder
    `logs`, or to /dev/null if that fails. Python's `sys.stderr` still goes to the terminal."""
    try:
        # The name is random, because every user of the host may write to Ray's folders.
        file = create_file(logs / f"coatcheck-serve-{os.getpid()}-{secrets.token_hex(8)}.err")
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    sys.stderr.flush()
    before, terminal = sys.stderr, os.dup(2)
    os.dup2(file, 2)
    os.close(file)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            sys.stderr.flush()
        os.dup2(terminal, 2)
        sys.stderr = before
        os.close(terminal)
