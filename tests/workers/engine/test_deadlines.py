"""A request that has not started by its deadline is refused, and no other request is."""

from dataclasses import replace

import pytest

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine
from tests.workers.fake_runner import SPEC, FakeRunner


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(name: str, seconds_left: float | None = None, n: int = 1) -> EngineRequest:
    """A request with a prompt that no other name has."""
    prompt = tuple(sum(map(ord, name)) % 90 + token for token in range(5))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=6, n=n, seed=1), seconds_left=seconds_left)


def run(engine: Engine, steps: int = 1000) -> tuple[set[str], dict[str, CoatcheckError]]:
    """Step `steps` times, or to the end. Return the finished requests, and the refused ones with their errors."""
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
def test_a_request_not_started_by_its_deadline_is_refused(depth: int) -> None:
    """Of the requests that wait for a slot only the overdue one is refused, with all its choices, in the first step
    after its deadline. A started request goes on after its deadline."""
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


@pytest.mark.parametrize("gone", ["aborted", "delivered"])
def test_the_deadline_is_kept_when_the_first_choice_is_gone(gone: str) -> None:
    """The choices that are left are refused at the deadline, also if the first was aborted or was delivered by another
    group."""
    clock = Clock()
    engine = Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, max_num_seqs=1, clock=clock)
    engine.submit_request(request("begun"))
    run(engine, 1)
    late = request("late", 2.0, n=3)
    engine.submit_request(late if gone == "aborted" else replace(late, resume={0: (1, 2, 3, 4, 5, 6)}))
    if gone == "aborted":
        engine.abort_request("late", 0)
    clock.now += 2.1
    assert set(run(engine, 1)[1]) == {"late"}


def test_a_request_has_started_with_any_of_its_choices() -> None:
    """A request whose first choice has ended, or was preempted, is not refused, and is no request that never was in a
    plan."""
    clock = Clock()
    engine = Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, max_num_seqs=1, clock=clock)
    engine.submit_request(request("begun", 2.0, n=2))
    assert engine.unstarted_requests() == {"begun"}
    finished, _ = run(engine, 6)
    assert finished == {"begun"} and engine.stats().waiting == 1, "one choice has ended and one waits"
    clock.now += 2.1
    assert engine.unstarted_requests() == set()
    assert not run(engine)[1]


def test_an_overdue_request_computes_nothing() -> None:
    """An idle engine refuses an overdue request in its next step, and the ranks compute nothing."""
    runner = FakeRunner(64, 8)
    engine = Engine(SPEC, runner, num_blocks=64, block_size=8, clock=Clock())
    engine.submit_request(request("late", 0.0))
    finished, refused = run(engine)
    assert not finished and set(refused) == {"late"}
    assert runner.computed == 0 and engine.stats().blocks_used == 0
