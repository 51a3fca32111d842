"""RayStart: starts a Ray for `coatcheck serve`, or joins one, and tries again until --ray-start-timeout has passed.

On a busy machine Ray's own time limits end its start too early. Limits that are settings are raised (see
ray_environment.py); for the one that is not, the raylet is stopped for a while (see raylet_pause.py). If an attempt
fails all the same, its processes are killed, and another attempt is made. Ray is imported by the first
attempt.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from ..proto.errors import Unavailable
from .command import fail
from .config import ServeConfig
from .descendants import adopt_orphans, descendants, disown_orphans, end_descendants
from .own_ray import ray_folder
from .ray_log import last_error, last_line, session_of
from .raylet_pause import RayletPause

_PROGRESS_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 1.0  # before another attempt
_ENDS_SECONDS: Final = 5.0  # what kill -9 needs where the disk is slow
_POLL_SECONDS: Final = 0.05
_TICK_SECONDS: Final = 0.5


class RayNotReady(Unavailable):
    """An attempt to start or join Ray has failed, and another one may succeed. `reason` is Ray's own."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason


class RayStart:
    """One start. `run` returns once this process is connected to Ray."""

    def __init__(self, config: ServeConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._is_own = config.ray_address is None
        self._began = time.monotonic()
        self._reason = ""  # why the last attempt failed
        self._pause: RayletPause | None = None  # of the attempt under way, where Ray is ours
        self._over = threading.Event()
        # Once the time is up, the clock's thread holds this until it ends the process: the main thread then waits here.
        self._verdict = threading.Lock()

    def run(self) -> None:
        """Raises Unavailable or InvalidConfig for what no further attempt would change.

        When the time is up amid an attempt, the process ends here with its one line and exit code 1: Ray's own code may
        wait for minutes, and cannot be interrupted.
        """
        if self._is_own:
            adopt_orphans()  # a raylet that ends itself leaves its helper processes behind, which must be found
        threading.Thread(target=self._watch_clock, daemon=True).start()
        try:
            while not self._is_connected():
                pass
        finally:
            self._over.set()
            if self._pause is not None:
                self._pause.end()
            if self._is_own:
                disown_orphans()

    def _is_connected(self) -> bool:
        """Makes one attempt. False: it has failed, its processes are killed, and another one may succeed."""
        import ray

        from . import launch

        try:
            launch.connect(self._config)
        except RayNotReady as error:
            with self._verdict:
                self._reason = self._logged_error() or error.reason
                self._say(f"{self._failure()}: {self._reason}; trying again ({self._progress()})")
                self._end_processes()
            ray.shutdown()
            time.sleep(_PAUSE_SECONDS)
            with self._verdict:
                return False
        with self._verdict:
            self._over.set()
            return True

    def _watch_clock(self) -> None:
        """Says every 10 s how long the start has taken; ends the process once the time is up."""
        ends = self._began + self._config.ray_start_timeout
        speaks = self._began + _PROGRESS_SECONDS
        doing = "still starting Ray" if self._is_own else f"still connecting to Ray at {self._config.ray_address}"
        while not self._over.wait(max(0.0, min(_TICK_SECONDS, ends - time.monotonic()))):
            with suppress(OSError):  # the time limit holds whatever becomes of the help
                self._help_raylet()
            if time.monotonic() >= ends:
                self._verdict.acquire()
                if not self._over.is_set():
                    self._give_up()
                self._verdict.release()
                return
            if time.monotonic() >= speaks:
                self._say(f"{doing} ({self._progress()})")
                speaks += _PROGRESS_SECONDS

    def _help_raylet(self) -> None:
        session = self._session()
        if session is None:
            return
        if self._pause is None or self._pause.session != session:
            self._pause = RayletPause(session)
        self._pause.poll()

    def _give_up(self) -> None:
        message = self._timed_out()  # before the processes end, and with that their logs
        try:
            self._end_processes()
        finally:
            os._exit(fail(message, 1))

    def _timed_out(self) -> str:
        failure = f"{self._failure()} within {self._config.ray_start_timeout:g} s"
        session = self._session()
        reason = self._logged_error() or self._reason or (session and last_line(session)) or "Ray says nothing"
        if self._is_own:
            advice = f"see {session / 'logs'}, make room on this machine" if session else "make room on this machine"
        else:
            advice = "see `ray status` on its head, give another --ray-address"
        return f"{failure}: {reason}; {advice}, or give more time with --ray-start-timeout"

    def _failure(self) -> str:
        return "Ray did not start" if self._is_own else f"no Ray cluster answers at {self._config.ray_address}"

    def _logged_error(self) -> str:
        session = self._session()
        return last_error(session) if session else ""

    def _session(self) -> Path | None:
        """Of the last attempt; None where there is none, or Ray is not ours."""
        return session_of(ray_folder(), os.getpid()) if self._is_own else None

    def _end_processes(self) -> None:
        """Of our own Ray every process, on Linux; of a cluster that was to be joined none is ours."""
        if not self._is_own:
            return
        end_descendants()
        deadline = time.monotonic() + _ENDS_SECONDS
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _progress(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s of at most {self._config.ray_start_timeout:g} s"

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)
