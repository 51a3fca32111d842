"""RayStart: starts a local Ray, or joins a Ray cluster, and tries again until --ray-start-timeout has passed.

On a busy machine Ray's own time limits end its start too early. Limits that Ray has a setting for are raised (see
ray_environment.py). For the one without a setting, the raylet is suspended for a while (see raylet_suspender.py). If an
attempt fails all the same, its processes are killed, and another attempt is made. The first attempt imports Ray.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from coatcheck.cluster.command import EXIT_FAILED, fail
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.local_ray import ray_folder
from coatcheck.cluster.ray_cluster.process_tree import adopt_orphans, descendants, kill_descendants
from coatcheck.cluster.ray_cluster.ray_log import find_session, last_error, last_line
from coatcheck.cluster.ray_cluster.raylet_suspender import RayletSuspender
from coatcheck.proto.errors import Unavailable

_PROGRESS_SECONDS: Final = 10.0  # between two progress lines
_RETRY_SECONDS: Final = 1.0  # from a failed attempt to the next one
_KILL_SECONDS: Final = 5.0  # longest wait until killed processes have disappeared; a slow disk delays them
_POLL_SECONDS: Final = 0.05
_TICK_SECONDS: Final = 0.5


class RayNotReady(Unavailable):
    """An attempt to start or join Ray has failed, and another one may succeed. `reason`: first line of Ray's error."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason


class RayStart:
    """Connects this process to Ray, in one or several attempts."""

    def __init__(self, config: ServeConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._starts_ray = config.ray_address is None
        self._began = time.monotonic()
        self._reason = ""  # why the last attempt failed
        self._suspender: RayletSuspender | None = None  # of the current attempt, if this process starts Ray
        self._finished = threading.Event()
        # Held while the result of an attempt is recorded, so that either the main thread continues or the thread of
        # _watch_clock ends the process.
        self._outcome_lock = threading.Lock()

    def wait_until_connected(self) -> None:
        """Return once this process is connected to Ray. Raises Unavailable or InvalidConfig if no further attempt can
        succeed.

        When the time is up during an attempt, another thread prints one line and ends the process with exit code 1,
        because Ray's code may wait for minutes and cannot be interrupted.
        """
        if self._starts_ray:
            adopt_orphans()  # to find the helper processes that a raylet leaves behind when it ends itself
        clock = threading.Thread(target=self._watch_clock, daemon=True)
        clock.start()
        try:
            while not self._try_connect():
                pass
        finally:
            self._finished.set()
            clock.join()  # else that thread could suspend the raylet after the next lines resume it
            if self._suspender is not None:
                self._suspender.resume_raylet()
            if self._starts_ray:
                adopt_orphans(False)

    def _try_connect(self) -> bool:
        """Make one attempt. If it fails and another may succeed, kill its processes and return False."""
        import ray

        from coatcheck.cluster.ray_cluster.ray_connection import connect_to_ray

        try:
            connect_to_ray(self._config)
        except RayNotReady as error:
            with self._outcome_lock:
                self._reason = self._logged_error() or error.reason
                self._print(f"{self._failure()}: {self._reason}; trying again ({self._progress()})")
                self._kill_ray()
            ray.shutdown()
            time.sleep(_RETRY_SECONDS)
            with self._outcome_lock:  # not while the other thread is ending the process
                return False
        with self._outcome_lock:
            self._finished.set()
            return True

    def _watch_clock(self) -> None:
        """Print every 10 s how long the start has taken. End the process once the time is up."""
        deadline = self._began + self._config.ray_start_timeout
        next_progress = self._began + _PROGRESS_SECONDS
        doing = "still starting Ray" if self._starts_ray else f"still connecting to Ray at {self._config.ray_address}"
        while not self._finished.wait(max(0.0, min(_TICK_SECONDS, deadline - time.monotonic()))):
            with suppress(OSError):  # an error here must not end the thread that keeps the time limit
                self._suspend_raylet_if_slow()
            if time.monotonic() >= deadline:
                self._outcome_lock.acquire()
                if not self._finished.is_set():
                    self._give_up()
                self._outcome_lock.release()
                return
            if time.monotonic() >= next_progress:
                self._print(f"{doing} ({self._progress()})")
                next_progress += _PROGRESS_SECONDS

    def _suspend_raylet_if_slow(self) -> None:
        session = self._session()
        if session is None:
            return
        if self._suspender is None or self._suspender.session != session:
            self._suspender = RayletSuspender(session)
        self._suspender.check_raylet()

    def _give_up(self) -> None:
        message = self._timeout_message()  # from the logs, before the processes are killed
        try:
            self._kill_ray()
        finally:
            os._exit(fail(message, EXIT_FAILED))

    def _timeout_message(self) -> str:
        failure = f"{self._failure()} within {self._config.ray_start_timeout:g} s"
        session = self._session()
        reason = self._logged_error() or self._reason or (session and last_line(session)) or "Ray has logged no reason"
        if self._starts_ray:
            advice = f"see {session / 'logs'}, " if session else ""
            advice += "reduce the load of this machine"
        else:
            advice = "see `ray status` on its head, give another --ray-address"
        return f"{failure}: {reason}; {advice}, or give more time with --ray-start-timeout"

    def _failure(self) -> str:
        return "Ray did not start" if self._starts_ray else f"no Ray cluster answers at {self._config.ray_address}"

    def _logged_error(self) -> str:
        session = self._session()
        return last_error(session) if session else ""

    def _session(self) -> Path | None:
        """The session folder of the last attempt; None if there is none yet, or if an existing Ray is joined."""
        return find_session(ray_folder(), os.getpid()) if self._starts_ray else None

    def _kill_ray(self) -> None:
        """Kill every process of a local Ray, on Linux. Does nothing if an existing Ray is joined."""
        if not self._starts_ray:
            return
        kill_descendants()
        deadline = time.monotonic() + _KILL_SECONDS
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _progress(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s of at most {self._config.ray_start_timeout:g} s"

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)
