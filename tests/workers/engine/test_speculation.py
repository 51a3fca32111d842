"""Draft tokens change how many steps a sequence takes, and nothing else."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.workers.core.prompt_lookup import Draft, PromptLookup
from tests.workers.collector import Collector, make_engine, request
from tests.workers.fake_runner import answer, next_token


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


def test_models_with_states_have_no_drafts() -> None:
    """States cannot be taken back after a wrong guess."""
    engine, _ = make_engine(snapshots=4, drafts=2)
    engine.submit_request(request("a", [1, 2, 1, 2, 1, 2], 20))
    Collector(engine).run()
