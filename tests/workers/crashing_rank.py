"""CrashingRank: a real rank whose process ends when it computes certain prompts."""

import ctypes
import dataclasses
import os
import signal
from typing import Any

import torch

from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.rank import Rank
from coatcheck.workers.rank_loading import LoadedRank
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.model_runner import ModelRunner

# The first token of a prompt says which rank ends, and how.
RAISES = 11
FAULTS = 12
LAST_RAISES = 13
LAST_FAULTS = 14
LAST_IS_KILLED = 15


class CrashingRunner:
    """Ends the process when a prompt begins with one of the tokens above, else computes the step."""

    def __init__(self, runner: ModelRunner, rank: int, tp: int) -> None:
        self._runner = runner
        self._first, self._last = rank == 0, rank == tp - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> DeviceStep:
        seen = {row.token_ids[0] for row in plan.new_sequences}
        if (RAISES in seen and self._first) or (LAST_RAISES in seen and self._last):
            raise ValueError("a defect")
        if (FAULTS in seen and self._first) or (LAST_FAULTS in seen and self._last):
            ctypes.string_at(0)
        if LAST_IS_KILLED in seen and self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(plan)


class CrashingRank(Rank):
    """A rank over a CrashingRunner."""

    def _load(self, communicator: Communicator, device: torch.device) -> LoadedRank:
        loaded = super()._load(communicator, device)
        runner = CrashingRunner(loaded.runner, self.rank, self.config.tp)
        return dataclasses.replace(loaded, runner=runner)  # type: ignore[arg-type]
