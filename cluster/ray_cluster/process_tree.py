"""Finds and kills the descendants of a process, and adopts descendants whose parent has ended.

When a process ends, the kernel gives its children to the nearest ancestor that adopts orphans (a child subreaper), else
to process 1, where `descendants` no longer finds them.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress
from typing import Final

import psutil

_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_SECONDS: Final = 0.02


def descendants(root: int) -> dict[int, str]:
    """The command line of each process below process `root`, by process id. Zombies are left out."""
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(root).children(recursive=True):
            with suppress(psutil.Error):  # ended since then, or a zombie
                found[process.pid] = " ".join(process.cmdline())
    return found


def children() -> set[int]:
    """The process ids of this process's children, including zombies."""
    return {process.pid for process in psutil.Process().children()}


def adopt_orphans(enabled: bool = True) -> None:
    """Make this process the parent of every descendant whose own parent ends; with `enabled` false, no longer. Linux
    only; elsewhere does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def reap_children(pids: set[int]) -> None:
    """Collect the exit status of those children in `pids` that have ended. They would stay zombies otherwise."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def kill_descendants(grace_seconds: float = 0.0) -> None:
    """Kill (SIGKILL) every descendant of this process that has not ended by itself after `grace_seconds`, and every
    process that they start meanwhile. Linux only; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    this = psutil.Process()
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and descendants(this.pid):
        time.sleep(_POLL_SECONDS)
    stopped: set[psutil.Process] = set()
    while more := set(this.children(recursive=True)) - stopped:
        for process in more:
            with suppress(psutil.Error):
                process.suspend()  # a suspended process starts no others
        stopped |= more
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()
