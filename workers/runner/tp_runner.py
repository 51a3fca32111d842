"""TpRunner: rank 0's runner, which has every rank carry out the plan that it carries out itself.

`follow` is the other ranks' whole life: receive a plan, carry it out, until one says stop. A plan without rows is a
heartbeat: all ranks meet in one small all-reduce, so that rank 0 notices one that is gone. It does not know what a
plan is for.
"""

import torch

from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.launched_step import DeviceStep
from coatcheck.workers.runner.model_runner import ModelRunner


class TpRunner:
    """The Runner that the engine is given when a group has more than one rank."""

    def __init__(self, runner: ModelRunner, communicator: Communicator) -> None:
        self._runner = runner
        self._communicator = communicator

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Sends the plan, then carries out rank 0's part."""
        self._communicator.broadcast_ints(plan.encode())
        return execute_plan(plan, self._runner, self._communicator)

    def stop(self) -> None:
        """Sends the other ranks home."""
        self._communicator.broadcast_ints(StepPlan(stop=True).encode())


def follow(runner: ModelRunner, communicator: Communicator) -> None:
    """Carries out rank 0's plans until it sends `stop`; raises when rank 0 is gone."""
    while not (plan := StepPlan.decode(communicator.broadcast_ints(None))).stop:
        execute_plan(plan, runner, communicator)


def execute_plan(plan: StepPlan, runner: ModelRunner, communicator: Communicator) -> DeviceStep:
    """One rank's part of a step."""
    if not plan.rows and communicator.size > 1:
        communicator.all_reduce(torch.zeros(1, device=runner.pool.device))
    return runner.launch(plan)
