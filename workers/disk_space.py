"""Whether the disk under Ray's folder is full, which is why processes of Ray die there without a word.

A process of Ray opens its logs before anything else. Where they cannot be written it ends at once, and Ray knows only
that it died.
"""

import os
import socket
from pathlib import Path
from typing import Final

_FULL_BYTES: Final = 1 << 20  # a process that starts writes some hundred KiB of logs


def full_disk(logs: str | Path) -> str:
    """A clause that says so where the disk of a Ray session's log folder is full, with what to do; else "".

    A disk without inodes left is full as well. A folder that cannot be looked at counts as not full.
    """
    try:
        about = os.statvfs(logs)
    except OSError:
        return ""
    is_root = os.geteuid() == 0  # may use what is kept back from others
    free_bytes = (about.f_bfree if is_root else about.f_bavail) * about.f_frsize
    free_files = about.f_ffree if is_root else about.f_favail
    without_files = about.f_files > 0 and free_files == 0  # some file systems have no limit, and say 0 of 0
    if free_bytes >= _FULL_BYTES and not without_files:
        return ""
    left = "no file more" if without_files else f"{free_bytes >> 10} KiB free"
    return (
        f"the disk under {Path(logs).parent.parent} on {socket.gethostname()} is full ({left}), so Ray can start no "
        "process there: make room, or start Ray with its folder on another disk (RAY_TMPDIR, or `ray start --temp-dir`)"
    )
