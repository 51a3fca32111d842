"""Descendants: the processes below one, as Linux tells them in /proc, and their end. It does not know what they are.

A process whose parent ends becomes its nearest adopter's child: where nobody adopts, that is the system's first
process, and it is out of sight.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_SECONDS: Final = 0.02


def descendants(root: int) -> dict[int, str]:
    """Every process below one that has not ended, with its command line."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):  # it has just ended
                state, parent = _text(entry / "stat").rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, pending = {}, [root]
    while pending:
        for pid in children.get(pending.pop(), []):
            pending.append(pid)
            with suppress(OSError):
                found[pid] = _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")
    return found


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends is this process's child, and stays in sight."""
    _set_subreaper(True)


def stop_adopting_orphans() -> None:
    """Undoes adopt_orphans: from now on a descendant whose parent ends goes to process 1, or to a subreaper above."""
    _set_subreaper(False)


def end_descendants(grace_seconds: float = 0.0) -> None:
    """kill -9 of those that have not ended by themselves in that time, and of whatever they still start."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and descendants(os.getpid()):
        time.sleep(_POLL_SECONDS)
    stopped: set[int] = set()
    while more := descendants(os.getpid()).keys() - stopped:  # one that is stopped starts no other
        for pid in more:
            _send(pid, signal.SIGSTOP)
        stopped |= more
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def children() -> set[int]:
    """The process ids of this process's children, including zombies."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found.update(map(int, _text(file).split()))
    return found


def reap(adopted: set[int]) -> None:
    """Reaps those of `adopted` that have ended, which would stay zombies otherwise."""
    for pid in adopted:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _set_subreaper(enabled: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def _text(file: Path) -> str:
    return file.read_text(errors="replace")  # names are bytes, and Linux cuts a long one anywhere


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
