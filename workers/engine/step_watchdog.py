"""StepWatchdog: ends a group whose step hangs.

A collective in a CUDA graph waits without limit for a rank that hangs or is gone, and the processes of the other ranks
still answer their supervisor. So rank 0 watches its own steps. The supervisor restarts a group that has ended.
"""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from coatcheck.workers.engine.engine_loop import EngineLoop

_CHECK_SECONDS: Final = 1.0
_UNMEASURED_STEP_SECONDS: Final = 60.0  # the longest step while the prefill rate is not measured
_PREFILL_TOLERANCE: Final = 4.0  # attention over a long context makes some prefills slower than the average


class StepHangs(Exception):
    """No step has ended for longer than the longest step may take."""


class StepWatchdog:
    """Call `start` before the loop runs, and `stop` after.

    `limit_seconds`: returns the seconds after which a step counts as hung. `on_hang`: called at most once, in the
    watchdog's thread, with a StepHangs.
    """

    def __init__(
        self,
        loop: EngineLoop,
        limit_seconds: Callable[[], float],
        on_hang: Callable[[StepHangs], None],
        *,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        self._loop = loop
        self._limit_seconds = limit_seconds
        self._on_hang = on_hang
        self._check_seconds = check_seconds
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return once the watchdog's thread has ended."""
        self._is_stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        woke_at = monotonic()
        suspended = 0.0  # seconds since the last step in which this process did not run
        last_step_at = self._loop.last_step_at
        while not self._is_stopped.wait(self._check_seconds):
            now = monotonic()
            if last_step_at != self._loop.last_step_at:
                last_step_at, suspended = self._loop.last_step_at, 0.0
            # While this process was stopped (SIGSTOP) or its host was suspended, no step could run either.
            suspended += max(now - woke_at - 2 * self._check_seconds, 0.0)
            woke_at = now
            age, limit = now - last_step_at - suspended, self._limit_seconds()
            if age > limit:
                self._on_hang(StepHangs(f"no step has ended for {age:.0f} s; a rank of this group hangs"))
                return


def longest_step_seconds(prefill_tokens_per_second: float, max_batch_tokens: int) -> float:
    """The longest time in seconds that a step may take. `prefill_tokens_per_second`: 0 if not measured yet."""
    if not prefill_tokens_per_second:
        return _UNMEASURED_STEP_SECONDS
    return _PREFILL_TOLERANCE * max_batch_tokens / prefill_tokens_per_second
