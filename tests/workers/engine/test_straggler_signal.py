"""A group is slow if its steps take far longer than similar steps did before."""

import random

from coatcheck.workers.core.step_plan import ScheduledSequence, StepPlan
from coatcheck.workers.engine.straggler_signal import StragglerSignal

CROSSOVER = 4096


def a_step(rng: random.Random, busy: bool) -> StepPlan:
    """A few short sequences, or if `busy` hundreds of long ones; with or without a prompt."""
    scheduled = [
        ScheduledSequence(slot, rng.randrange(30_000) if busy else rng.randrange(200), 1, True)
        for slot in range(rng.randint(100, 250) if busy else rng.randint(1, 4))
    ]
    if rng.random() < 0.3:
        scheduled.append(ScheduledSequence(255, 0, rng.randint(32, 2048 if busy else 64), True))
    return StepPlan(0, scheduled=scheduled)


def seconds_of(plan: StepPlan) -> float:
    """The duration of a step on a healthy machine: an overhead, and each token with its attention."""
    return 0.005 + sum(2e-5 * one.num_tokens * (1 + one.start / CROSSOVER) for one in plan.scheduled)


class Machine:
    """A group's machine and its signal."""

    def __init__(self) -> None:
        self.signal = StragglerSignal(CROSSOVER)
        self.now = 0.0
        self._rng = random.Random(1)

    def work(self, seconds: float, *, times: float = 1.0, busy: bool = False) -> list[float]:
        """Run steps for `seconds`, each `times` as long as on a healthy machine. Return the slowness after each."""
        found, until = [], self.now + seconds
        while self.now < until:
            plan = a_step(self._rng, busy)
            took = times * seconds_of(plan) * self._rng.uniform(0.8, 1.25)
            self.now += took
            self.signal.record_step(plan, took, self.now)
            found.append(self.signal.slowness)
        return found


def test_more_work_is_not_slow() -> None:
    """The slowness stays near 1 when load changes between a few short sequences and hundreds of long ones."""
    machine = Machine()
    found = [*machine.work(30), *machine.work(60, busy=True), *machine.work(30), *machine.work(60, busy=True)]
    assert min(found) > 0.5 and max(found) < 2


def test_a_slowdown_shows_within_seconds() -> None:
    """A machine that becomes ten times slower has slowness 5 within fifteen seconds of steps, and 10 in the end."""
    machine = Machine()
    machine.work(60)
    found = machine.work(30, times=10)
    assert machine.work(1)[0] > 5 and 7 < max(found) < 13
    machine = Machine()
    machine.work(60)
    assert machine.work(15, times=10)[-1] > 5
    assert machine.work(30)[-1] < 1.5  # and forgotten when it is over


def test_a_pause_is_not_slow() -> None:
    """One step of many seconds, such as a compilation, does not make the group slow."""
    machine = Machine()
    machine.work(60)
    plan = a_step(random.Random(2), busy=False)
    machine.now += 20
    machine.signal.record_step(plan, 20.0, machine.now)
    assert machine.signal.slowness < 3
    assert max(machine.work(5)) < 3


def test_a_lasting_slowdown_becomes_usual() -> None:
    """A machine that stays slower has slowness 1 again after some minutes of steps."""
    machine = Machine()
    machine.work(60)
    found = machine.work(1200, times=8)
    assert max(found) > 5 and found[-1] < 2


def test_steps_before_a_pause_do_not_count() -> None:
    """Steps before a pause of ten seconds do not count; the slowness is 1 until there are new ones."""
    machine = Machine()
    assert machine.signal.slowness == 1
    machine.work(60)
    assert machine.work(20, times=10)[-1] > 5
    machine.now += 30
    assert set(machine.work(1)) == {1.0}
    machine.signal.record_step(StepPlan(), 100.0, machine.now)  # a heartbeat
    assert machine.signal.slowness == 1
