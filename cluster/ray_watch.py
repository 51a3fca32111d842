"""RayWatch: ends `coatcheck serve` in time, with one line, when the Ray that it uses is lost.

Ray's client waits a minute for a head (the GCS process) or a node manager (the raylet process) that is gone. It cannot
be interrupted meanwhile, and then ends the process with lines of its own. A thread of RayWatch is faster: a Ray of our
own is over once either process has ended. A cluster that was there before may have its head started again, so RayWatch
waits for that head as long as Ray's client would.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console

from .command import fail
from .descendants import adopt_orphans, children, descendants, end_descendants, reap
from .own_ray import forget_ended, ray_folder
from .ray_address import listens
from .stop_signals import Signals

_LOOK_SECONDS: Final = 1.0
_MISSES: Final = 3  # looks in a row that find no head: a busy head may miss one
_KILL_SECONDS: Final = 5.0  # that kill -9 may take where the machine is busy
# What Ray's processes are, by their program's name.
_PROCESSES: Final = {"gcs_server": "head (its GCS", "raylet": "node manager (its raylet"}


class RayWatch:
    """Between `start_own` or `start_joined` and `stop`, the loss of Ray ends this process with exit code 1."""

    def __init__(self, console: Console, signals: Signals) -> None:
        self._console = console
        self._signals = signals
        self._watched: dict[int, str] = {}  # descriptors of processes (pidfd), each with what it is
        self._stopped = threading.Event()
        # Taken once, by what decides how the command ends: the main thread that stops the watch, or a loss.
        self._verdict = threading.Lock()

    def start_own(self, logs: Path) -> None:
        """Watch the GCS and the raylet that this process has started; `logs`: where Ray's logs lie. Linux only."""
        if sys.platform != "linux":
            return
        adopt_orphans()  # what a raylet has started is to be found when the raylet is gone
        names = {pid: _program(command) for pid, command in descendants(os.getpid()).items()}
        for pid, name in names.items():
            if name in _PROCESSES:
                with suppress(OSError):  # a kernel or sandbox without pidfd_open: then Ray's own minute has to do
                    self._watched[os.pidfd_open(pid)] = f"{_PROCESSES[name]}, process {pid})"
        self._run(self._watch_own, logs)

    def start_joined(self, address: str, patience: float) -> None:
        """Watch the head of the cluster at `address`, which may be away for `patience` seconds."""
        self._run(self._watch_joined, address, patience)

    def stop(self) -> None:
        """Ends the watch, so that Ray may be shut down. Never returns if Ray is lost: the watch ends the process."""
        if self._ended(0.0):
            threading.Event().wait()
        self._stopped.set()
        self._verdict.acquire()

    def _run(self, watch: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=watch, args=arguments, daemon=True).start()

    def _watch_own(self, logs: Path) -> None:
        ours = children()  # Ray's client waits for these itself
        while not (ended := self._ended(_LOOK_SECONDS)):
            reap(children() - ours)
            if self._stopped.is_set():
                return
        if self._verdict.acquire(blocking=False):
            try:
                end_descendants()
                self._wait_all_ended()
                forget_ended(ray_folder())  # whose head no longer listens
            finally:
                self._end(
                    f"Ray's {ended} has ended, and with it all that ran here; start the same command again (if nobody "
                    f"ended that process, {logs} and `dmesg` may say why it did)"
                )

    def _wait_all_ended(self) -> None:
        """Until the watched processes, which were killed, have ended; not for ever."""
        for descriptor in self._watched:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(_KILL_SECONDS * 1000)

    def _ended(self, seconds: float) -> str:
        """Which of the watched processes has ended, waiting for that long; else ""."""
        poller = select.poll()
        for descriptor in self._watched:
            poller.register(descriptor, select.POLLIN)
        found = poller.poll(seconds * 1000)
        return self._watched[found[0][0]] if found else ""

    def _watch_joined(self, address: str, patience: float) -> None:
        lost_since = None
        misses = 0
        while not self._stopped.wait(_LOOK_SECONDS):
            if listens(address):
                if lost_since is not None:
                    self._say(f"Ray's head at {address} is back")
                lost_since = None
                misses = 0
                continue
            misses += 1
            if misses < _MISSES:
                continue
            if lost_since is None:
                lost_since = time.monotonic()
                self._say(
                    f"warning: Ray's head at {address} is gone; what runs goes on, and waits {patience:.0f} s for it"
                )
            is_over = time.monotonic() - lost_since > patience
            if (is_over or self._signals.asked.is_set()) and self._verdict.acquire(blocking=False):
                gone = f"Ray's head (its GCS) at {address} has been gone for {time.monotonic() - lost_since:.0f} s"
                self._end(
                    f"{gone}; start Ray's head again, then this command: with Redis it finds what still runs, without "
                    "Redis everything starts anew"
                )

    def _end(self, message: str) -> NoReturn:
        self._console.show_cursor()  # a progress bar may have hidden it
        os._exit(fail(message, 1))

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def _program(command: str) -> str:
    return os.path.basename(command.split(" ", 1)[0])
