"""What counts as slow: steps that take far longer than such steps did before, and nothing else."""

import random

from coatcheck.workers.core.step_plan import Row, StepPlan
from coatcheck.workers.engine.straggler_signal import StragglerSignal

CROSSOVER = 4096


def a_step(rng: random.Random, busy: bool) -> StepPlan:
    """A few short sequences, or as many long ones as there may be, with or without a prompt among them."""
    rows = [
        Row(slot, rng.randrange(30_000) if busy else rng.randrange(200), 1, True)
        for slot in range(rng.randint(100, 250) if busy else rng.randint(1, 4))
    ]
    if rng.random() < 0.3:
        rows.append(Row(255, 0, rng.randint(32, 2048 if busy else 64), True))
    return StepPlan(0, rows=rows)


def seconds_of(plan: StepPlan) -> float:
    """A machine's: an overhead, and then each token with its attention."""
    return 0.005 + sum(2e-5 * row.num_tokens * (1 + row.start / CROSSOVER) for row in plan.rows)


class Machine:
    """Takes steps one behind the other, `times` as long as it should."""

    def __init__(self) -> None:
        self.signal = StragglerSignal(CROSSOVER)
        self.now = 0.0
        self._rng = random.Random(1)

    def work(self, seconds: float, *, times: float = 1.0, busy: bool = False) -> list[float]:
        """So long, by its clock; what it was told to be after each step."""
        told, until = [], self.now + seconds
        while self.now < until:
            plan = a_step(self._rng, busy)
            took = times * seconds_of(plan) * self._rng.uniform(0.8, 1.25)
            self.now += took
            self.signal.record_step(plan, took, self.now)
            told.append(self.signal.slowness)
        return told


def test_more_work_is_not_slow() -> None:
    """From a few short sequences to hundreds of long ones with prompts among them: as usual, at every moment."""
    machine = Machine()
    told = [*machine.work(30), *machine.work(60, busy=True), *machine.work(30), *machine.work(60, busy=True)]
    assert min(told) > 0.5 and max(told) < 2


def test_a_machine_that_slows_down_is_told_within_seconds() -> None:
    """Ten times as long from one moment on: five times within fifteen seconds of steps, and ten in the end."""
    machine = Machine()
    machine.work(60)
    told = machine.work(30, times=10)
    assert machine.work(1)[0] > 5 and 7 < max(told) < 13
    machine = Machine()
    machine.work(60)
    assert machine.work(15, times=10)[-1] > 5
    assert machine.work(30)[-1] < 1.5  # and forgotten when it is over


def test_a_pause_is_not_slow() -> None:
    """One step of many seconds, as when something is compiled, is not held against those around it."""
    machine = Machine()
    machine.work(60)
    plan = a_step(random.Random(2), busy=False)
    machine.now += 20
    machine.signal.record_step(plan, 20.0, machine.now)
    assert machine.signal.slowness < 3
    assert max(machine.work(5)) < 3


def test_what_lasts_becomes_usual() -> None:
    """A machine that stays slower is as usual again after some minutes of steps."""
    machine = Machine()
    machine.work(60)
    told = machine.work(1200, times=8)
    assert max(told) > 5 and told[-1] < 2


def test_what_was_before_a_rest_does_not_count() -> None:
    """After ten seconds without a step it is judged by new ones alone; nothing is known before there are any."""
    machine = Machine()
    assert machine.signal.slowness == 1
    machine.work(60)
    assert machine.work(20, times=10)[-1] > 5
    machine.now += 30
    assert set(machine.work(1)) == {1.0}
    machine.signal.record_step(StepPlan(), 100.0, machine.now)  # a heartbeat
    assert machine.signal.slowness == 1
