"""LoopHeartbeat: tells a busy event loop from a hung one, read from another thread.

A task on the loop records the time every 0.25 s. If it is late and the loop's thread uses CPU time, the loop is busy
and will answer. If it is late and the thread uses none, the loop is blocked. A call that runs on the loop itself could
not tell the two apart, because neither loop would answer it.
"""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Final

_TICK_SECONDS: Final = 0.25
# A loop that is silent for longer, and used the CPU for less than _LEAST_BUSY of that time, counts as blocked.
_BLOCKED_SECONDS: Final = 30.0
_LEAST_BUSY: Final = 0.1
# A loop that is silent for longer counts as hung even if it uses the CPU: no callback of a router takes that long.
_ENDLESS_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`silent_seconds`: how late the loop's next tick is. `busy_seconds`: CPU time of its thread since the last
    tick."""

    silent_seconds: float
    busy_seconds: float

    @property
    def hang_reason(self) -> str:
        """Why the loop counts as hung, for a log line; empty if it makes progress or is merely busy."""
        if self.silent_seconds > _BLOCKED_SECONDS and self.busy_seconds < _LEAST_BUSY * self.silent_seconds:
            return f"its event loop has been blocked for {self.silent_seconds:.0f} s"
        if self.silent_seconds > _ENDLESS_SECONDS:
            return f"its event loop has been busy with one thing for {self.silent_seconds:.0f} s"
        return ""


class LoopHeartbeat:
    """Construct it inside the event loop that it watches. Any thread may call `read`."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._last = (time.monotonic(), time.clock_gettime(self._clock))
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    def read(self) -> Heartbeat:
        """The time and CPU time since the last tick."""
        last_tick, busy = self._last
        silent = max(time.monotonic() - last_tick - _TICK_SECONDS, 0.0)
        return Heartbeat(silent, max(time.clock_gettime(self._clock) - busy, 0.0))

    def close(self) -> None:
        """Stops the task. Do not `read` afterwards: the loop would look silent."""
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            self._last = (time.monotonic(), time.clock_gettime(self._clock))
            await asyncio.sleep(_TICK_SECONDS)
