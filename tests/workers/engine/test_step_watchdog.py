"""A group whose step does not end is ended."""

import threading

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.step_watchdog import StepHangs, StepWatchdog, longest_step_seconds
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep


class HangingRunner(FakeRunner):
    """Waits in its first step for `release`, as a collective waits for a rank that is gone."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.release = threading.Event()

    def launch(self, plan: StepPlan) -> FakeStep:
        self.release.wait()
        return super().launch(plan)


def make_loop(runner: FakeRunner) -> EngineThread:
    engine = Engine(SPEC, runner, num_blocks=64, block_size=4)
    return EngineThread(engine, on_step=lambda output, stats: None, on_death=lambda error: None)


def test_a_step_that_does_not_end_is_reported_once() -> None:
    """`on_hang` gets the age of the step, and the watchdog's thread ends."""
    runner, found, is_reported = HangingRunner(), list[StepHangs](), threading.Event()
    loop = make_loop(runner)

    def on_hang(error: StepHangs) -> None:
        found.append(error)
        is_reported.set()

    request = EngineRequest("a", (1, 2), SamplingParams(max_tokens=5, seed=7))
    loop.submit_request(request, lambda error: None, lambda: None)
    watchdog = StepWatchdog(loop, lambda: 0.2, on_hang, check_seconds=0.05)
    watchdog.start()
    loop.start()
    assert is_reported.wait(MAX_WAIT_SECONDS)
    watchdog.stop()
    runner.release.set()
    loop.stop()
    assert len(found) == 1 and "no step has ended for" in str(found[0])


def test_an_idle_group_does_not_hang() -> None:
    """Empty steps are progress: several heartbeats later nothing was reported."""
    steps, found, beats = [0], list[StepHangs](), threading.Event()
    engine = Engine(SPEC, FakeRunner(64, 4), num_blocks=64, block_size=4)

    def on_step(*_: object) -> None:
        steps[0] += 1
        if steps[0] == 4:
            beats.set()

    loop = EngineThread(engine, on_step=on_step, on_death=lambda error: None)
    watchdog = StepWatchdog(loop, lambda: MAX_WAIT_SECONDS, found.append, check_seconds=0.05)
    watchdog.start()
    loop.start()
    assert beats.wait(MAX_WAIT_SECONDS)
    watchdog.stop()
    loop.stop()
    assert not found


def test_the_longest_step_follows_the_measured_rate() -> None:
    """Four times what a full prefill takes; a minute before anything was measured."""
    assert longest_step_seconds(0.0, 2048) == 60.0
    assert longest_step_seconds(1024.0, 2048) == 8.0
