"""CrashingRank: a real rank whose process really ends when it computes certain prompts; see SEEN."""

import ctypes
import os
import signal
from typing import Any

from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.rank import Rank
from coatcheck.workers.runner.model_runner import DeviceStep, ModelRunner

# By a prompt's first token: the rank that ends by it, and how.
RAISES = 11
FAULTS = 12
LAST_RAISES = 13
LAST_FAULTS = 14
LAST_IS_KILLED = 15


class CrashingRunner:
    """A runner before which the ways to end are tried."""

    def __init__(self, runner: ModelRunner, rank: int, tp: int) -> None:
        self._runner = runner
        self._first, self._last = rank == 0, rank == tp - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Ends the process, or carries out the plan."""
        seen = {row.token_ids[0] for row in plan.new_rows}
        if (RAISES in seen and self._first) or (LAST_RAISES in seen and self._last):
            raise ValueError("a defect")
        if (FAULTS in seen and self._first) or (LAST_FAULTS in seen and self._last):
            ctypes.string_at(0)
        if LAST_IS_KILLED in seen and self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(plan)


class CrashingRank(Rank):
    """Its runner is such a one."""

    def _build_runner(self, *arguments: Any) -> Any:
        return CrashingRunner(super()._build_runner(*arguments), self.rank, self.config.tp)
