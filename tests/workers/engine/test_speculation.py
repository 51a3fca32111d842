"""Draft tokens change how many steps a sequence takes, and nothing else."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.workers.core.model_spec import ShortConvSpec
from coatcheck.workers.core.prompt_lookup import Draft, PromptLookup
from coatcheck.workers.engine.engine import Engine
from tests.workers.collector import Collector, make_engine, request
from tests.workers.fake_runner import SPEC, FakeRunner, answer, next_token


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Drafts of choice 0 whose tokens are each right three times in four. The fake model's text has no repetitions."""
    draws = random.Random(5)

    def guess(self: PromptLookup, token_ids: Sequence[int], count: int) -> Draft:
        text = list(token_ids)
        while len(text) < len(token_ids) + count:
            text.append(next_token(text, 0, 7) if draws.random() < 0.75 else draws.randrange(1, 1000))
        return Draft(8, text[len(token_ids) :])

    monkeypatch.setattr(PromptLookup, "draft", guess)
    return draws


@pytest.mark.usefixtures("guesses")
def test_a_sequence_takes_fewer_steps_and_gets_the_same_tokens() -> None:
    """Right guesses save steps; wrong ones leave no trace."""
    engine, runner = make_engine(drafts=4)
    engine.submit_request(request("a", [*range(1, 20)], 60))
    collected = Collector(engine).run()
    assert collected.tokens["a", 0] == answer([*range(1, 20)], 60, 0, 7)
    stats = engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert runner.plans < 40
    assert stats.generated_tokens == len(collected.tokens["a", 0])


@given(data=st.data())
def test_tokens_are_those_without_drafts(data: st.DataObject) -> None:
    """Small pools, preemptions, several choices, shared prefixes, aborts and ends in the middle of a draft."""
    draws = random.Random(data.draw(st.integers(0, 999)))
    quality = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))

    def guess(self: PromptLookup, token_ids: Sequence[int], count: int) -> Draft:
        text = list(token_ids)
        while len(text) < len(token_ids) + count:
            text.append(next_token(text, 0, 7) if draws.random() < quality else draws.randrange(1000))
        return Draft(8, text[len(token_ids) :])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "draft", guess)
        blocks = data.draw(st.integers(14, 40))
        engine, _ = make_engine(
            blocks, seqs=data.draw(st.integers(1, 6)), budget=data.draw(st.sampled_from([3, 8, 64])),
            drafts=data.draw(st.integers(1, 6)),
        )  # fmt: skip
        collected = Collector(engine)
        wanted = {}
        for number in range(data.draw(st.integers(1, 8))):
            prompt = [*range(1, data.draw(st.integers(2, 12))), number % 3 + 1]
            choices, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 30))
            engine.submit_request(request(f"r{number}", prompt, tokens, n=choices))
            wanted.update({(f"r{number}", c): answer(prompt, tokens, c, 7) for c in range(choices)})
            for _ in range(data.draw(st.integers(0, 6))):
                collected.step()
            if data.draw(st.integers(0, 5)) == 0:
                engine.abort_request(f"r{number}")
                wanted = {key: value for key, value in wanted.items() if key[0] != f"r{number}"}
        collected.run()
        assert {key: collected.tokens[key] for key in wanted} == wanted


@pytest.mark.usefixtures("guesses")
def test_drafts_leave_blocks_and_rows_to_sequences() -> None:
    """A full pool or batch has no drafts, and no sequence is preempted for one."""
    engine, runner = make_engine(12, seqs=2, drafts=4)
    for name in "ab":
        engine.submit_request(request(name, [*range(1, 10)], 12))
    Collector(engine).run()
    assert engine.stats().draft_tokens == 0, "two rows are all rows"
    assert runner.plans > 12


def test_a_pipelined_engine_has_no_drafts() -> None:
    """It plans a step before it knows the tokens that a draft would follow."""
    with pytest.raises(AssertionError, match="pipelined"):
        make_engine(depth=1, drafts=2)


@pytest.mark.usefixtures("guesses")
def test_models_with_states_have_no_drafts() -> None:
    """States cannot be taken back after a wrong guess. The same requests have drafts without states."""
    drafted = []
    for state_layers in ((), (ShortConvSpec(0, 8, 3),)):
        spec, runner = replace(SPEC, state_layers=state_layers), FakeRunner(40, 4, keeps_states=bool(state_layers))
        engine = Engine(
            spec, runner, num_blocks=40, block_size=4, max_num_seqs=8, max_draft_tokens=2,
            num_snapshots=4 * len(state_layers),
        )  # fmt: skip
        engine.submit_request(request("a", [*range(1, 20)], 30))
        Collector(engine).run()
        drafted.append(engine.stats().draft_tokens)
    assert drafted[0] > 0 and drafted[1] == 0


def serve_and_move(draws: random.Random, drafts: int) -> dict[tuple[str, int], tuple[list[int], str, int | None]]:
    """(tokens, finish reason, stop token) of each choice. Requests arrive over time and may have delivered tokens. The
    pool is small, the host tier is slow and loses blocks."""
    blocks, ticks, delays = draws.randint(14, 40), count(), random.Random(3)
    runner = FakeRunner(blocks, 4, delay=lambda: delays.randrange(3))
    runner.seconds = dict.fromkeys(runner.seconds, 1e-9)
    engine = Engine(
        SPEC, runner, num_blocks=blocks, block_size=4, max_num_seqs=draws.randint(1, 7), host_blocks=40,
        max_batch_tokens=draws.choice([1, 3, 8, 64]), max_draft_tokens=drafts, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    collected, delivered = Collector(engine), {}
    for number in range(draws.randint(1, 9)):
        name, prompt = f"r{number}", [*range(1, draws.randint(2, 30)), number % 3 + 1]
        resume = {0: answer(prompt, draws.randint(1, 8), 0, 7)} if number % 3 == 0 else {}
        wanted = request(
            name, prompt, 10 + number, n=1 + number % 2, min_tokens=number, priority=number % 2,
            stop_token_ids=tuple(range(number, 1000, 20)), resume={c: tuple(said) for c, said in resume.items()},
        )  # fmt: skip
        delivered.update({(name, choice): said for choice, said in resume.items()})
        engine.submit_request(wanted)
        for _ in range(draws.randint(0, 6)):
            collected.step()
        runner.broken |= set(list(runner.host)[::5])
    collected.run()
    assert engine.stats().blocks_used == 0
    return {
        key: ([*delivered.get(key, []), *collected.tokens[key]], str(end.finish_reason), end.stop_token_id)
        for key, end in collected.ends.items()
    }


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), quality=st.sampled_from([0.0, 0.5, 0.9, 1.0]), drafts=st.integers(1, 6))
def test_ends_and_failovers_are_those_without_drafts(seed: int, quality: float, drafts: int) -> None:
    """Stop tokens, minimum lengths, delivered tokens, priorities, restores and corrupt blocks; no block is lost."""
    draws = random.Random(seed)

    def guess(self: PromptLookup, token_ids: Sequence[int], count: int) -> Draft:
        text, choice = list(token_ids), draws.randrange(2)
        while len(text) < len(token_ids) + count:
            text.append(next_token(text, choice, 7) if draws.random() < quality else draws.randrange(1000))
        return Draft(8, text[len(token_ids) :])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "draft", guess)
        assert serve_and_move(random.Random(seed), drafts) == serve_and_move(random.Random(seed), 0)
