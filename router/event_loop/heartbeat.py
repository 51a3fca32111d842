"""LoopHeartbeat: tells a busy event loop from a hung one, read from another thread.

A task on the loop records the time every 0.25 s. If it is late and the loop's thread computes, or is ready to run but
gets no CPU, the loop is busy and will answer. If it is late and the thread does neither, the loop is blocked. A call
that runs on the loop itself could not tell the two apart, because neither loop would answer it.
"""

import asyncio
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK_SECONDS: Final = 0.25
# A loop that is silent for longer, and computed or waited for a CPU for less than _LEAST_BUSY of that time, counts as
# blocked.
_BLOCKED_SECONDS: Final = 30.0
_LEAST_BUSY: Final = 0.1
# A loop that computes for longer between two ticks counts as hung: no callback of a router takes that long.
_ENDLESS_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`silent_seconds`: how late the loop's next tick is. Since the last tick its thread has computed for
    `busy_seconds`, and was ready to run but had no CPU for `starved_seconds`."""

    silent_seconds: float
    busy_seconds: float
    starved_seconds: float = 0.0

    @property
    def hang_reason(self) -> str:
        """Why the loop counts as hung, for a log line; empty if it makes progress or is merely busy."""
        runnable_seconds = self.busy_seconds + self.starved_seconds
        if self.silent_seconds > _BLOCKED_SECONDS and runnable_seconds < _LEAST_BUSY * self.silent_seconds:
            return f"its event loop has been blocked for {self.silent_seconds:.0f} s"
        if self.busy_seconds > _ENDLESS_SECONDS:
            return f"its event loop has computed for {self.busy_seconds:.0f} s without a pause"
        return ""


class LoopHeartbeat:
    """Construct it inside the event loop that it watches. Any thread may call `read`."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = self._now()
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    def read(self) -> Heartbeat:
        """The state since the last tick."""
        passed = [max(now - last, 0.0) for now, last in zip(self._now(), self._last, strict=True)]
        return Heartbeat(max(passed[0] - _TICK_SECONDS, 0.0), *passed[1:])

    def close(self) -> None:
        """Stops the task. Do not `read` afterwards: the loop would look silent."""
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            self._last = self._now()
            await asyncio.sleep(_TICK_SECONDS)

    def _now(self) -> tuple[float, float, float]:
        """(time, CPU time of the loop's thread, time for which that thread was ready to run but had no CPU)."""
        try:
            starved = int(self._schedstat.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the kernel keeps no such statistics
            starved = 0.0
        return time.monotonic(), time.clock_gettime(self._clock), starved
