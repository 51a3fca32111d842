"""LoadPace: when a group tells its routers how it is.

Soon after a step, seldom while nothing changes, and on while a long step goes on: for silence means that the engine is
stuck. Pure decisions; it reads no clock and knows no streams.
"""

from coatcheck.workers.core.step_output import EngineStats
from coatcheck.workers.engine.engine_loop import HEARTBEAT_SECONDS

LOAD_SECONDS = 0.1
_QUIET_LOAD_SECONDS = 1.0
_SHORTEST_STUCK_SECONDS, _UNMEASURED_STEP_SECONDS = 3.0, 60.0
_PATIENCE = 4.0  # times the average: attention over a long context makes some prefills dearer


class LoadPace:
    """Asked every LOAD_SECONDS; what `is_due` says yes to is sent."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._sent: EngineStats | None = None
        self._sent_at = 0.0

    def is_due(self, stats: EngineStats, now: float, step_age: float) -> bool:
        """`stats` are those after the last step, which was `step_age` seconds ago; times in seconds."""
        if stats is self._sent and not self._is_long_step(stats, step_age):
            return False
        if self._is_idle(stats) and now - self._sent_at < _QUIET_LOAD_SECONDS - LOAD_SECONDS:
            return False
        self._sent, self._sent_at = stats, now
        return True

    def _is_idle(self, stats: EngineStats) -> bool:
        before = self._sent
        return before is not None and (stats.running, stats.waiting, stats.generated_tokens) == (
            before.running,
            before.waiting,
            before.generated_tokens,
        )

    def _is_long_step(self, stats: EngineStats, age: float) -> bool:
        """Longer than a heartbeat, and yet no longer than a step may take: on a CPU a full prefill takes seconds."""
        rate = stats.prefill_tokens_per_second
        longest = _PATIENCE * self._max_batch_tokens / rate if rate else _UNMEASURED_STEP_SECONDS
        return 2 * HEARTBEAT_SECONDS < age < _SHORTEST_STUCK_SECONDS + longest
