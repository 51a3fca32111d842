"""RayWatch: ends `coatcheck serve` early and with one error line when the Ray that it uses is lost.

Ray's client waits a minute for a lost GCS (the head's process) or raylet (the node manager's process). The client
cannot be interrupted meanwhile, and then ends the process with log lines of its own. RayWatch has a thread that is
faster: it counts a local Ray as lost once either process has ended. The head of a joined cluster may be restarted, so
RayWatch waits for that head as long as Ray's client would.
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

from coatcheck.cluster.command import EXIT_FAILED, fail
from coatcheck.cluster.ray_cluster.local_ray import delete_stale_tokens, ray_folder
from coatcheck.cluster.ray_cluster.process_tree import (
    adopt_orphans,
    children,
    descendants,
    kill_descendants,
    reap_children,
)
from coatcheck.cluster.ray_cluster.ray_address import is_listening
from coatcheck.cluster.session.stop_signals import StopSignals

_POLL_SECONDS: Final = 1.0
_MISSES: Final = 3  # failed connections in a row before the head counts as lost: a busy head may miss one
_KILL_SECONDS: Final = 5.0  # longest wait until a killed process has ended; a busy machine delays that
# Program names of Ray's processes, and their names in messages, which add the process id and close the bracket.
_PROCESSES: Final = {"gcs_server": "head (its GCS", "raylet": "node manager (its raylet"}


class RayWatch:
    """From `watch_local_ray` or `watch_joined_ray` until `stop`, the loss of Ray ends this process with exit code 1."""

    def __init__(self, console: Console, signals: StopSignals) -> None:
        self._console = console
        self._signals = signals
        self._watched: dict[int, str] = {}  # pidfd -> the process in messages
        self._stopped = threading.Event()
        # Acquired once and never released, by the thread that decides how the command ends: `stop`, or a loss of Ray.
        self._exit_lock = threading.Lock()

    def watch_local_ray(self, logs: Path) -> None:
        """Watch the GCS and the raylet that this process has started. `logs`: Ray's log folder. Linux only."""
        if sys.platform != "linux":
            return
        adopt_orphans()  # to find the processes of a raylet that has ended
        names = {pid: _program(command) for pid, command in descendants(os.getpid()).items()}
        for pid, name in names.items():
            if name in _PROCESSES:
                with suppress(OSError):  # without pidfd_open in this kernel or sandbox, only Ray's client notices
                    self._watched[os.pidfd_open(pid)] = f"{_PROCESSES[name]}, process {pid})"
        self._run(self._watch_local, logs)

    def watch_joined_ray(self, address: str, reconnect_seconds: float) -> None:
        """Watch the head of the cluster at `address`. The process ends once the head has been gone for
        `reconnect_seconds`."""
        self._run(self._watch_joined, address, reconnect_seconds)

    def stop(self) -> None:
        """End the watch, so that Ray may be shut down. Never returns if Ray is lost: the watch ends this process."""
        if self._wait_for_end(0.0):
            threading.Event().wait()  # until the other thread has ended this process
        self._stopped.set()
        self._exit_lock.acquire()

    def _run(self, watch: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=watch, args=arguments, daemon=True).start()

    def _watch_local(self, logs: Path) -> None:
        ours = children()  # Ray's client waits for these itself
        while not (ended := self._wait_for_end(_POLL_SECONDS)):
            reap_children(children() - ours)
            if self._stopped.is_set():
                return
        if self._exit_lock.acquire(blocking=False):
            try:
                kill_descendants()
                self._wait_all_ended()
                delete_stale_tokens(ray_folder())  # removes the token file, now that the head no longer listens
            finally:
                self._end_process(
                    f"Ray's {ended} has ended, so every process of this command was ended; start the same command "
                    f"again (if nobody ended that process, {logs} and `dmesg` may say why it ended)"
                )

    def _wait_all_ended(self) -> None:
        """Wait until the watched processes, which were killed, have ended; at most _KILL_SECONDS for each."""
        for descriptor in self._watched:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(_KILL_SECONDS * 1000)

    def _wait_for_end(self, seconds: float) -> str:
        """Wait up to `seconds` for a watched process to end. Returns its name for messages; "" if none ended."""
        poller = select.poll()
        for descriptor in self._watched:
            poller.register(descriptor, select.POLLIN)
        found = poller.poll(seconds * 1000)
        return self._watched[found[0][0]] if found else ""

    def _watch_joined(self, address: str, reconnect_seconds: float) -> None:
        lost_since = None
        misses = 0
        while not self._stopped.wait(_POLL_SECONDS):
            if is_listening(address):
                if lost_since is not None:
                    self._print(f"Ray's head at {address} is back")
                lost_since = None
                misses = 0
                continue
            misses += 1
            if misses < _MISSES:
                continue
            if lost_since is None:
                lost_since = time.monotonic()
                self._print(
                    f"warning: Ray's head at {address} is gone; requests are still served, and this command waits "
                    f"{reconnect_seconds:.0f} s for the head"
                )
            is_over = time.monotonic() - lost_since > reconnect_seconds
            if (is_over or self._signals.drain_requested.is_set()) and self._exit_lock.acquire(blocking=False):
                gone = f"Ray's head (its GCS) at {address} has been gone for {time.monotonic() - lost_since:.0f} s"
                self._end_process(
                    f"{gone}; start Ray's head again, then this command: with Redis it finds the groups that still "
                    "run, without Redis it starts new ones"
                )

    def _end_process(self, message: str) -> NoReturn:
        self._console.show_cursor()  # a progress bar may have hidden it
        os._exit(fail(message, EXIT_FAILED))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def _program(command: str) -> str:
    return os.path.basename(command.split(" ", 1)[0])
