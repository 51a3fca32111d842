"""The engine's thread: commands of other threads run between steps."""

import threading
import time

from coatcheck.proto.errors import CoatcheckError
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep, answer


class DyingRunner(FakeRunner):
    """Fails as a runner does when a rank is gone."""

    def launch(self, plan: StepPlan) -> FakeStep:
        if plan.scheduled:
            raise RuntimeError("Connection reset by peer")
        return super().launch(plan)


def test_requests_are_answered_refused_and_dropped_from_another_thread() -> None:
    """Submissions, refusals, aborts and calls reach the engine's thread, and `stop` ends it."""
    engine = Engine(SPEC, FakeRunner(64, 4), num_blocks=64, block_size=4)
    tokens: list[int] = []
    ended, refused = threading.Event(), threading.Event()
    refusals: list[str] = []
    taken: list[str] = []

    def on_step(output: StepOutput, stats: EngineStats) -> None:
        for each in output.outputs:
            tokens.extend(each.token_ids)
            if each.finish_reason:
                ended.set()

    def on_refused(error: CoatcheckError) -> None:
        refusals.append(str(error))
        refused.set()

    loop = EngineThread(engine, on_step=on_step, on_death=lambda error: None)
    loop.start()
    loop.submit_request(
        EngineRequest("a", (1, 2), SamplingParams(max_tokens=5, seed=7)), on_refused, lambda: taken.append("a")
    )
    loop.submit_request(EngineRequest("bad", (), SamplingParams()), on_refused, lambda: taken.append("bad"))
    assert ended.wait(10) and refused.wait(10)
    assert tokens == answer([1, 2], 5, seed=7)
    assert "empty" in refusals[0] and taken == ["a", "bad"]
    loop.submit_request(EngineRequest("long", (1,) * 50, SamplingParams(ignore_eos=True)), on_refused, lambda: None)
    loop.abort_request("long")
    assert loop.call_between_steps(lambda e: (e.check(), e.stats().running)).result(10) == (None, 0)  # type: ignore[func-returns-value]
    loop.stop()
    assert not loop.is_alive


def test_prompts_that_arrive_together_do_not_stop_running_requests() -> None:
    """Steps go on between long submissions that are queued together, and every submission is processed in order."""
    engine = Engine(SPEC, FakeRunner(640, 4), num_blocks=640, block_size=4)
    steps_at: list[int] = []  # for each submission, how many steps had ended
    num_steps = 0
    all_processed = threading.Event()

    def on_step(output: StepOutput, stats: EngineStats) -> None:
        nonlocal num_steps
        num_steps += 1

    def on_processed() -> None:
        steps_at.append(num_steps)
        time.sleep(0.02)  # as long as a prompt of 30,000 tokens takes
        if len(steps_at) == 8:
            all_processed.set()

    loop = EngineThread(engine, on_step=on_step, on_death=lambda error: None)
    running = EngineRequest("running", (1, 2), SamplingParams(max_tokens=2000, seed=7, ignore_eos=True))
    loop.submit_request(running, lambda error: None, lambda: None)
    for number in range(8):
        request = EngineRequest(f"long{number}", (1, 2, 3), SamplingParams(max_tokens=1, seed=7))
        loop.submit_request(request, lambda error: None, on_processed)
    loop.start()
    assert all_processed.wait(10)
    loop.stop()
    assert steps_at == list(range(steps_at[0], steps_at[0] + 8))


def test_a_failed_step_calls_on_death() -> None:
    """An error in a step reaches `on_death`, so that the whole group can end."""
    died = threading.Event()
    errors: list[BaseException] = []

    def on_death(error: BaseException) -> None:
        errors.append(error)
        died.set()

    engine = Engine(SPEC, DyingRunner(8, 4), num_blocks=8, block_size=4)
    loop = EngineThread(engine, on_step=lambda output, stats: None, on_death=on_death)
    loop.start()
    loop.submit_request(EngineRequest("a", (1,), SamplingParams()), lambda error: None, lambda: None)
    assert died.wait(10)
    assert "Connection reset" in str(errors[0])
