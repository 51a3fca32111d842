"""TpRunner: rank 0's runner in a group of several ranks. It broadcasts each plan, so that every rank computes it.

rank 0        TpRunner.launch(plan) for each step, then stop_followers()
other ranks   follow_driver(): receive plans and compute them until rank 0 stops
"""

import torch

from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.device_step import DeviceStep
from coatcheck.workers.runner.model_runner import ModelRunner


class TpRunner:
    """Implements Runner over rank 0's ModelRunner."""

    def __init__(self, runner: ModelRunner, communicator: Communicator) -> None:
        self._runner = runner
        self._communicator = communicator

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Send the plan to all ranks, and compute rank 0's part."""
        self._communicator.broadcast_ints(plan.encode())
        return launch_on_rank(plan, self._runner, self._communicator)

    def stop_followers(self) -> None:
        """End `follow_driver` on the other ranks."""
        self._communicator.broadcast_ints(StepPlan(stop=True).encode())


def follow_driver(runner: ModelRunner, communicator: Communicator) -> None:
    """Compute rank 0's plans until it stops. Raises PeerLost if rank 0 is gone."""
    while not (plan := StepPlan.decode(communicator.broadcast_ints(None))).stop:
        launch_on_rank(plan, runner, communicator)


def launch_on_rank(plan: StepPlan, runner: ModelRunner, communicator: Communicator) -> DeviceStep:
    """Launch one rank's part of a step.

    A plan without rows is a heartbeat: one all-reduce, so that an idle group notices a rank that is gone.
    """
    if not plan.scheduled and communicator.size > 1:
        communicator.all_reduce(torch.zeros(1, device=runner.pool.device))
    return runner.launch(plan)
