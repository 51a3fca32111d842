"""LoopPulse: whether an event loop still makes progress; another thread can read it while the loop is busy.

A loop whose thread uses the processor is busy, and will answer. One that neither runs callbacks nor uses the processor
is blocked for good. A call that runs on the loop cannot tell one from the other: it gets no answer from either.
"""

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Final

_ROUND_SECONDS: Final = 0.25
# A loop that is silent for so long, and has computed for less than a tenth of it, waits for what never comes.
_BLOCKED_SECONDS: Final = 30.0
_LEAST_BUSY: Final = 0.1
# No single callback of a router takes so long.
_ENDLESS_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """`silent_seconds`: how late the loop's tick is; `busy_seconds`: processor time of its thread since the last."""

    silent_seconds: float
    busy_seconds: float

    @property
    def hangs(self) -> str:
        """Why the loop counts as hung, for a log line; empty for a loop that makes progress or is busy."""
        if self.silent_seconds > _BLOCKED_SECONDS and self.busy_seconds < _LEAST_BUSY * self.silent_seconds:
            return f"its event loop has been blocked for {self.silent_seconds:.0f} s"
        if self.silent_seconds > _ENDLESS_SECONDS:
            return f"its event loop has been busy with one thing for {self.silent_seconds:.0f} s"
        return ""


class LoopPulse:
    """Made inside the event loop that it watches; `read` may be called by any thread."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._last = (time.monotonic(), time.clock_gettime(self._clock))
        self._task = asyncio.create_task(self._beat(), name="pulse")

    def read(self) -> Pulse:
        """The loop's state at this moment."""
        rounds, busy = self._last
        silent = max(time.monotonic() - rounds - _ROUND_SECONDS, 0.0)
        return Pulse(silent, max(time.clock_gettime(self._clock) - busy, 0.0))

    def close(self) -> None:
        """Ends the watch."""
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            self._last = (time.monotonic(), time.clock_gettime(self._clock))
            await asyncio.sleep(_ROUND_SECONDS)
