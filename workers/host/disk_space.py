"""Detects a full disk under Ray's folder.

A Ray process first opens its log files. If the disk is full, the process ends at once without a message, and Ray
reports only that the process died.
"""

import os
import socket
from pathlib import Path
from typing import Final

_FULL_BYTES: Final = 1 << 20  # a starting process writes a few hundred KiB of logs


def describe_full_disk(logs: str | Path) -> str:
    """A clause for an error message if the disk of `logs`, a Ray session's log folder, is full; else "".

    A disk without free inodes counts as full, too. A disk that cannot be checked counts as not full.
    """
    try:
        about = os.statvfs(logs)
    except OSError:
        return ""
    is_root = os.geteuid() == 0  # root may use the reserved blocks
    free_bytes = (about.f_bfree if is_root else about.f_bavail) * about.f_frsize
    free_files = about.f_ffree if is_root else about.f_favail
    without_files = about.f_files > 0 and free_files == 0  # file systems without a limit report 0 of 0
    if free_bytes >= _FULL_BYTES and not without_files:
        return ""
    left = "no inodes free" if without_files else f"{free_bytes >> 10} KiB free"
    return (
        f"the disk under {Path(logs).parent.parent} on {socket.gethostname()} is full ({left}), so Ray can start no "
        "process there: make room, or start Ray with its folder on another disk (RAY_TMPDIR, or `ray start --temp-dir`)"
    )
