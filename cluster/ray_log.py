"""RayLog: the one line of Ray's own logs that says why Ray did not start.

Ray's exception names a timeout; the cause is in the logs of the raylet (the process that manages one node) or of the
GCS (the cluster's control store). It does not import Ray.
"""

import os
import re
import stat
from pathlib import Path
from typing import Final

# Where a cause may stand, the likeliest first. A raylet that ends itself writes why into both of its files.
_FILES: Final = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_TAIL_BYTES: Final = 256 << 10
_LINE: Final = re.compile(r"\[\S+ \S+ (?P<level>[A-Z]) \d+ \d+\] \((?P<process>\w+)\) \S+:\d+:\s+(?P<text>.*)")
_ERRORS: Final = "FCE"  # fatal, critical, error
# Ray puts this sentence before every check that fails; it is no reason.
_BOILERPLATE: Final = re.compile(r"An unexpected system state has occurred\..*?we'll work with you to fix it\.\s*")
_LONGEST: Final = 400


def session_of(folder: Path, pid: int) -> Path | None:
    """The newest session that process `pid` has started, below Ray's folder; None: it has started none."""
    # Ray names a session by its time and by the process that started it. Every user may write to Ray's folder.
    sessions = [session for session in folder.glob(f"session_*_{pid}") if _is_ours(session)]
    return max(sessions, default=None, key=lambda session: session.name)


def _is_ours(folder: Path) -> bool:
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def last_error(session: Path) -> str:
    """The last line that says error or worse, without its header (time, level, process ids, source file); empty where
    there is none."""
    return _last(session, _ERRORS)


def last_line(session: Path) -> str:
    """The last line, whatever it says, without its header; empty where there is none."""
    return _last(session, "")


def _last(session: Path, levels: str) -> str:
    for name in _FILES:
        found = [line for line in _tail(session / "logs" / name) if not levels or line["level"] in levels]
        if found:
            text = " ".join(_BOILERPLATE.sub("", found[-1]["text"]).split())
            return f"{found[-1]['process']}: {text}"[:_LONGEST]
    return ""


def _tail(file: Path) -> list[re.Match[str]]:
    """The lines of Ray's format at the file's end. Everybody may write to Ray's folder: no link is followed, and a
    FIFO does not block."""
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
