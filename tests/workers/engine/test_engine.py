"""The engine over a fake model that reads its KV back: a wrong plan gives wrong tokens."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.proto.errors import InvalidRequest, NeverFits
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import FinishReason
from tests.examples import examples
from tests.workers.collector import Collector, make_engine, request
from tests.workers.fake_runner import answer, next_token


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_the_models_own(depth: int) -> None:
    """A request's tokens are those that the model gives it alone, however requests are batched."""
    engine, _ = make_engine(depth=depth)
    rng = random.Random(0)
    prompts = {f"r{i}": [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 40))] for i in range(12)}
    for name, prompt in prompts.items():
        engine.submit_request(request(name, prompt, 10))
    done = Collector(engine).run()
    for name, prompt in prompts.items():
        assert done.tokens[name, 0] == answer(prompt, 10, seed=7)
    assert engine.stats().blocks_used == 0


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), depth=st.integers(0, 1), num_blocks=st.integers(12, 40), budget=st.integers(8, 48))
def test_any_mix_is_answered_exactly(data: st.DataObject, depth: int, num_blocks: int, budget: int) -> None:
    """Shared prefixes, forks, resumes, aborts and preemption in any order never change an answer nor lose a block."""
    engine, _ = make_engine(num_blocks, depth=depth, seqs=data.draw(st.integers(1, 8)), budget=budget)
    collector = Collector(engine)
    stems = [[5] * 9, [6] * 14, [5] * 4 + [7] * 8]
    wanted: dict[tuple[str, int], list[int]] = {}
    for i in range(data.draw(st.integers(1, 10))):
        prompt = data.draw(st.sampled_from(stems)) + data.draw(st.lists(st.integers(1, 9), max_size=5))
        n, limit = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 14))
        resume = {}
        for choice in range(n):
            whole = answer(prompt, limit, choice, 7)
            kept = data.draw(st.integers(0, len(whole))) if data.draw(st.booleans()) else 0
            resume[choice] = tuple(whole[:kept])
            wanted[f"r{i}", choice] = whole[kept:]
        engine.submit_request(request(f"r{i}", prompt, limit, n=n, resume=resume))
        for _ in range(data.draw(st.integers(0, 4))):
            collector.step()
        if data.draw(st.integers(0, 4)) == 0:
            name, choice = data.draw(st.sampled_from(sorted(wanted)))
            engine.abort_request(name, choice)
            engine.check()
    collector.run()
    for key, tokens in wanted.items():
        if key in collector.ends:
            assert collector.tokens[key] == tokens
        else:
            assert collector.tokens.get(key, []) == tokens[: len(collector.tokens.get(key, []))]
    assert engine.stats().blocks_used == 0 and not engine.stats().running


def test_a_follow_up_hits_prompt_and_answer() -> None:
    """The next turn of a chat finds the blocks of its prompt and of the generated reply."""
    engine, runner = make_engine()
    prompt = list(range(1, 22))
    first = Collector(engine)
    engine.submit_request(request("a", prompt, 12))
    said = first.run().tokens["a", 0]
    follow_up = prompt + said + [3, 4, 5]
    computed = runner.computed
    engine.submit_request(request("b", follow_up, 4))
    second = Collector(engine).run()
    reused = (len(prompt) + len(said) - 1) // 4 * 4  # the last generated token has no KV
    assert second.first["b", 0].cached_device_tokens == reused
    assert runner.computed - computed == len(follow_up) - reused + len(second.tokens["b", 0]) - 1


def test_simultaneous_requests_share_a_prefix_computed_once() -> None:
    """Requests that arrive together wait for the one that is computing their prefix rather than compute it too."""
    engine, runner = make_engine(budget=16)
    stem = list(range(1, 33))
    for i in range(4):
        engine.submit_request(request(f"r{i}", [*stem, 100 + i], 1))
    Collector(engine).run()
    assert runner.computed == 33 + 3


def test_salts_do_not_share() -> None:
    """The same prompt under another salt finds nothing in the cache."""
    engine, _ = make_engine()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.submit_request(request(name, list(range(1, 18)), 1, salt=salt))
        cached = Collector(engine).run().first[name, 0].cached_device_tokens
        assert cached == (16 if name == "c" else 0)


def test_choices_share_the_prompts_blocks() -> None:
    """n choices hold the prompt's blocks once, and copy only the block that they write."""
    engine, runner = make_engine()
    prompt = list(range(1, 31))  # 7 blocks and a half
    engine.submit_request(request("a", prompt, 6, n=4, ignore_eos=True))
    collector = Collector(engine)
    for _ in range(3):
        collector.step()
    assert engine.stats().running == 4
    assert engine.stats().blocks_used == 7 + 4
    collector.run()
    assert runner.computed == 30 + 3 + 4 * 5
    for choice in range(4):
        assert len(collector.tokens["a", choice]) == 6


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    """While a long prompt is computed in chunks, every running sequence gets a token at every step."""
    engine, _ = make_engine(num_blocks=600, budget=32)
    for i in range(3):
        engine.submit_request(request(f"short{i}", [i + 1, 2], 60, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    engine.submit_request(request("long", [9] * 2000, 1))
    before = {key: len(tokens) for key, tokens in collector.tokens.items()}
    for _ in range(20):
        collector.step()
    for key, count in before.items():
        assert len(collector.tokens[key]) == count + 20
    assert collector.run().tokens["long", 0] == answer([9] * 2000, 1, seed=7)


def test_preemption_keeps_the_oldest_and_loses_nothing() -> None:
    """When the pool is too small for all, later sequences are preempted and computed again, with the same tokens."""
    engine, _ = make_engine(num_blocks=12)
    prompts = {f"r{i}": [i + 1] * 9 for i in range(4)}
    for name, prompt in prompts.items():
        engine.submit_request(request(name, prompt, 30, ignore_eos=True))
    collector = Collector(engine)
    order = []
    while engine.has_work:
        ended = set(collector.ends)
        collector.step()
        order += sorted(set(collector.ends) - ended)
    assert engine.stats().preemptions > 0
    assert order[0] == ("r0", 0)
    for name, prompt in prompts.items():
        said: list[int] = []
        while len(said) < 30:
            said.append(next_token(prompt + said, 0, 7))
        assert collector.tokens[name, 0] == said


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (EngineRequest("x", (), SamplingParams()), "empty"),
        (EngineRequest("x", (1000,), SamplingParams()), "vocabulary"),
        (EngineRequest("x", (1,) * 300, SamplingParams()), "Shorten the prompt or lower max_tokens"),
        (EngineRequest("x", (1,) * 100, SamplingParams(max_tokens=200)), "max_tokens"),
        (EngineRequest("x", (1,), SamplingParams(stop_token_ids=(1000,))), "stop_token_ids"),
        (EngineRequest("x", (1,), SamplingParams(logit_bias={5000: 1.0})), "logit_bias"),
        (EngineRequest("x", (1,), SamplingParams(), {3: (1,)}), "resume"),
        (EngineRequest("x", (1,), SamplingParams(), {0: (-4,)}), "vocabulary"),
    ],
)
def test_bad_requests_are_refused_and_nothing_else_moves(bad: EngineRequest, word: str) -> None:
    """A request that can never be answered is refused at once with what to change. A running request goes on."""
    engine, _ = make_engine()
    engine.submit_request(request("good", [1, 2, 3], 5))
    with pytest.raises(InvalidRequest, match=word):
        engine.submit_request(bad)
    assert Collector(engine).run().tokens["good", 0] == answer([1, 2, 3], 5, seed=7)


def test_a_prompt_larger_than_the_pool_never_fits() -> None:
    """A request that the pool cannot hold alone is refused; one that just fits is answered."""
    engine, _ = make_engine(num_blocks=8)
    with pytest.raises(NeverFits):
        engine.submit_request(request("big", [1] * 30, 3))
    engine.submit_request(request("fits", [1] * 30, 2))
    assert len(Collector(engine).run().tokens["fits", 0]) == 2


def test_events_rebuild_the_cache_exactly() -> None:
    """The blocks after all events are those of the pool's own snapshot."""
    engine, _ = make_engine(num_blocks=16)
    held: set[bytes] = set()
    for i in range(12):
        engine.submit_request(request(f"r{i}", [i % 5 + 1] * 13 + [i], 9))
        while engine.has_work:
            for event in engine.step().events:
                assert (event.block_hash in held) != event.stored, "stored twice or removed unheld"
                held ^= {event.block_hash}
    assert held == {event.block_hash for event in engine.begin_snapshot().read_chunk(16)}
    assert held


def test_stop_tokens_and_limits_are_told_apart() -> None:
    """The finish reason and the stopping token say why a choice ended."""
    prompt = [4, 4]
    said = answer(prompt, 6, seed=7)
    engine, _ = make_engine()
    engine.submit_request(request("stop", prompt, 6, stop_token_ids=(said[2],)))
    engine.submit_request(request("length", prompt, 3))
    ends = Collector(engine).run().ends
    assert (ends["stop", 0].finish_reason, ends["stop", 0].stop_token_id) == (FinishReason.STOP, said[2])
    assert (ends["length", 0].finish_reason, ends["length", 0].stop_token_id) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_lowest_priority_number_goes_first(depth: int) -> None:
    """The request with the lowest priority number is admitted first and preempted last. Equal numbers go in order of
    arrival."""
    engine, _ = make_engine(num_blocks=12, depth=depth, seqs=2)
    collector = Collector(engine)
    for number, priority in enumerate((0, 5, 5, -1, 0, -1)):
        engine.submit_request(request(f"r{number}", [number + 1] * 12, max_tokens=20, priority=priority))
        if number == 1:
            collector.step()
    collector.run()
    order = [name for name, _ in collector.first]
    assert order == ["r0", "r1", "r3", "r5", "r4", "r2"]
    for (name, _), tokens in collector.tokens.items():
        assert tokens == answer([int(name[1:]) + 1] * 12, 20, seed=7)
    assert engine.stats().preemptions > 0


def test_the_load_counts_predicted_uncached_tokens() -> None:
    """A waiting prompt counts with the uncached tokens that its router predicts, a running one with what is left of it,
    further choices with nothing. The seconds of steps with prompts are counted, those of decodes are not."""
    engine, _ = make_engine(seqs=1)
    engine.submit_request(dataclasses.replace(request("a", [1] * 40), uncached_tokens=1))
    assert engine.stats().queued_prefill_tokens == 0  # a single token counts as a decode
    engine.submit_request(dataclasses.replace(request("b", [2] * 40, n=3), uncached_tokens=12))
    engine.submit_request(request("c", [3] * 40))
    assert engine.stats().queued_prefill_tokens == 12 + 40
    collector = Collector(engine)
    collector.step()
    spent = engine.stats().prefill_seconds
    assert spent > 0
    collector.step()
    assert engine.stats().prefill_seconds == spent and engine.stats().step_seconds > 0
    collector.run()
    assert engine.stats().queued_prefill_tokens == 0
