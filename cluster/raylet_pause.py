"""RayletPause: stops a raylet while its helper processes start, since by itself it does not wait long enough.

A raylet starts two Python processes, its agents, and ends itself unless they have written their ports to files of the
session within 15 s; Ray has no setting for that limit. On two cores under a load of 13 each of four starts in a row
failed so. A raylet that is stopped (SIGSTOP) and goes on (SIGCONT) once the files are there finds them before it looks
at the clock. Linux only.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from .descendants import descendants

_AGENTS: Final = 2
# On a machine with cores to spare agents need less, and the raylet is never stopped.
_PATIENT_SECONDS: Final = 8.0


class RayletPause:
    """For one attempt to start Ray. Call `poll` at least once a second."""

    def __init__(self, session: Path) -> None:
        self.session = session
        self._since: float | None = None  # when the raylet's agents were first seen
        self._stopped: int | None = None

    def poll(self) -> None:
        """Stops the raylet, or lets it go on; changes nothing where this version of Ray waits for no files."""
        raylet = next((pid for pid, command in descendants(os.getpid()).items() if _is_raylet(command)), None)
        # An agent that has ended is for the raylet to report.
        waits = raylet is not None and self._lacks_ports() and len(descendants(raylet)) >= _AGENTS
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        if self._stopped is not None and not waits:
            self._send(self._stopped, signal.SIGCONT)
            self._stopped = None
        elif self._stopped is None and self._since is not None and time.monotonic() > self._since + _PATIENT_SECONDS:
            assert raylet is not None
            self._send(raylet, signal.SIGSTOP)
            self._stopped = raylet

    def end(self) -> None:
        """Lets a stopped raylet go on."""
        if self._stopped is not None:
            self._send(self._stopped, signal.SIGCONT)
            self._stopped = None

    def _lacks_ports(self) -> bool:
        try:
            from ray._raylet import (  # type: ignore[attr-defined]  # a compiled module says nothing to type checkers
                DASHBOARD_AGENT_LISTEN_PORT_NAME,
                METRICS_AGENT_PORT_NAME,
                METRICS_EXPORT_PORT_NAME,
                RUNTIME_ENV_AGENT_PORT_NAME,
            )
        except ImportError:  # a Ray that waits for no files
            return False
        names = (
            DASHBOARD_AGENT_LISTEN_PORT_NAME,
            METRICS_AGENT_PORT_NAME,
            METRICS_EXPORT_PORT_NAME,
            RUNTIME_ENV_AGENT_PORT_NAME,
        )
        return any(not any(self.session.glob(f"{name}_*")) for name in names)

    @staticmethod
    def _send(pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_raylet(command: str) -> bool:
    return command.partition(" ")[0].endswith("/raylet/raylet")
