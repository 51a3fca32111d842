"""A request that has not begun by its deadline never does, and takes nothing with it."""

import pytest

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine
from tests.workers.fake_runner import SPEC, FakeRunner


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(name: str, seconds_left: float | None = None, n: int = 1) -> EngineRequest:
    """With a prompt of its own."""
    prompt = tuple(sum(map(ord, name)) % 90 + token for token in range(5))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=6, n=n, seed=1), seconds_left=seconds_left)


def run(engine: Engine, steps: int = 1000) -> tuple[set[str], dict[str, CoatcheckError]]:
    """So many steps, or to the end: who was answered whole, and who was refused."""
    finished: set[str] = set()
    refused: dict[str, CoatcheckError] = {}
    while engine.has_work and steps:
        steps -= 1
        output = engine.step()
        engine.check()
        finished |= {one.request_id for one in output.outputs if one.finish_reason}
        refused |= dict(output.refused)
    return finished, refused


@pytest.mark.parametrize("depth", [0, 1])
def test_what_has_not_begun_by_its_deadline_never_does(depth: int) -> None:
    """Of those that wait for a slot only the late ones are refused, all choices at once, and not one step sooner; what
    has begun goes on, though its deadline passes too."""
    clock = Clock()
    runner = FakeRunner(64, 8)
    engine = Engine(SPEC, runner, num_blocks=64, block_size=8, max_num_seqs=2, pipeline_depth=depth, clock=clock)
    engine.submit_request(request("begun", 1.0))
    run(engine, 2 + depth)
    engine.submit_request(request("other"))
    engine.submit_request(request("late", 2.0, n=2))
    engine.submit_request(request("later", 3.0))
    engine.submit_request(request("patient"))
    clock.now += 1.9
    _, refused = run(engine, 1)
    assert not refused
    clock.now += 0.2
    finished, refused = run(engine)
    assert set(refused) == {"late"} and isinstance(refused["late"], DeadlineExceeded)
    assert {"begun", "other", "later", "patient"} == finished
    assert engine.stats().blocks_used == 0


def test_a_deadline_that_has_passed_computes_nothing() -> None:
    """With nothing else to do the group says so in its next step, and no rank hears of it."""
    runner = FakeRunner(64, 8)
    engine = Engine(SPEC, runner, num_blocks=64, block_size=8, clock=Clock())
    engine.submit_request(request("late", 0.0))
    finished, refused = run(engine)
    assert not finished and set(refused) == {"late"}
    assert runner.computed == 0 and engine.stats().blocks_used == 0
