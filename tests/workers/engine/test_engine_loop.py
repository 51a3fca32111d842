"""The engine's thread: commands of other threads run between steps."""

import threading

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
