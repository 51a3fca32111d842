"""HeldBackRank: a real rank whose steps take at least HELD_STEP_SECONDS while a file exists.

A test can so act while streams run, on a machine of any speed."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.rank import Rank
from coatcheck.workers.rank_loading import LoadedRank
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.model_runner import ModelRunner

HELD_STEP_SECONDS = 0.1


def hold_file(model: Path) -> Path:
    """The ranks of the checkpoint in the folder `model` are held back while this file exists."""
    return model / "hold-back"


class HeldBackRunner:
    """A runner that waits before each step while the file exists."""

    def __init__(self, runner: ModelRunner, hold: Path) -> None:
        self._runner = runner
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> DeviceStep:
        if self._hold.exists():
            time.sleep(HELD_STEP_SECONDS)
        return self._runner.launch(plan)


class HeldBackRank(Rank):
    """A rank over a HeldBackRunner."""

    def _load(self, communicator: Communicator, device: torch.device) -> LoadedRank:
        loaded = super()._load(communicator, device)
        runner = HeldBackRunner(loaded.runner, hold_file(Path(self.config.model)))
        return dataclasses.replace(loaded, runner=runner)  # type: ignore[arg-type]
