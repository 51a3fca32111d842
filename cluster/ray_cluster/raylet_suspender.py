"""RayletSuspender: suspends the raylet while its agent processes start, because its time limit for them is too short.

A raylet starts two Python processes, its agents, and ends itself unless they have written their ports to files of the
session within 15 s. Ray has no setting for that limit. On two cores under a load of 13, four of four starts failed for
that reason. A raylet that is suspended (SIGSTOP) and resumed (SIGCONT) once the files exist finds them before it checks
the time. Linux only.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from coatcheck.cluster.ray_cluster.process_tree import descendants

_AGENTS: Final = 2
# Ray's constants that hold the prefixes of the port files. With a Ray that lacks one, the raylet is never suspended.
_PORT_FILES: Final = (
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
# After this long without the files the raylet is suspended. On an idle machine the agents need less.
_SUSPEND_AFTER_SECONDS: Final = 8.0


class RayletSuspender:
    """Suspends and resumes the raylet of one attempt to start Ray. Call `check_raylet` at least once a second."""

    def __init__(self, session: Path) -> None:
        self.session = session
        self._since: float | None = None  # when the raylet was first seen waiting for its agents
        self._stopped: int | None = None  # process id of the suspended raylet

    def check_raylet(self) -> None:
        """Suspend or resume the raylet, as needed. Does nothing if this version of Ray does not wait for port files."""
        raylet = next((pid for pid, command in descendants(os.getpid()).items() if _is_raylet(command)), None)
        # If an agent has ended, the raylet must run, so that it reports that.
        is_waiting = raylet is not None and self._waits_for_ports() and len(descendants(raylet)) >= _AGENTS
        if not is_waiting:
            self._since = None
            self.resume_raylet()
            return
        if self._since is None:
            self._since = time.monotonic()
        if self._stopped is None and time.monotonic() - self._since > _SUSPEND_AFTER_SECONDS:
            assert raylet is not None
            _send(raylet, signal.SIGSTOP)
            self._stopped = raylet

    def resume_raylet(self) -> None:
        """Resume the raylet if it is suspended."""
        if self._stopped is not None:
            _send(self._stopped, signal.SIGCONT)
            self._stopped = None

    def _waits_for_ports(self) -> bool:
        from ray import _raylet

        prefixes = [getattr(_raylet, name, None) for name in _PORT_FILES]
        return None not in prefixes and any(not any(self.session.glob(f"{prefix}_*")) for prefix in prefixes)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_raylet(command: str) -> bool:
    return command.partition(" ")[0].endswith("/raylet/raylet")
