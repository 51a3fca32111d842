"""Structured output through the engine with a real model: always what was asked for, and the same on every road."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance.numpy import fill_next_token_bitmask

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.prompt_lookup import Draft, PromptLookup
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.workers.ranks import run_ranks
from tests.workers.structured.structured_engine import (
    EOS,
    JSON,
    LARGE,
    OTHER,
    PROMPT,
    Make,
    engines_of,
    load_alone,
    params,
    run,
    text_of,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("structured"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    """The same, as one rank holds it."""
    return load_alone(checkpoint)


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """Makes an engine with a pool of its own."""
    return engines_of(model)


@pytest.mark.parametrize(
    ("grammar", "holds"),
    [
        (JSON, lambda text: set(json.loads(text)) == {"name", "sizes"}),
        (Grammar("json_schema", '{"type": "object", "maxProperties": 2}'), lambda text: type(json.loads(text)) is dict),
        (Grammar("regex", r"[a-f]{3,9}-(fox|dog)"), lambda text: re.fullmatch(r"[a-f]{3,9}-(fox|dog)", text)),
        (Grammar("grammar", 'start: "<" /[0-9]{2,4}/ ">"'), lambda text: re.fullmatch(r"<[0-9]{2,4}>", text)),
        (Grammar("grammar", 'root ::= "a" [0-9]+ "z"'), lambda text: re.fullmatch(r"a[0-9]+z", text)),
        (Grammar.of_choices(["the lazy dog", 'a "quote"\n']), lambda text: text in ("the lazy dog", 'a "quote"\n')),
    ],
    ids=["schema", "object", "regex", "lark", "gbnf", "choices"],
)
def test_every_answer_is_what_was_asked_for(make: Make, grammar: Grammar, holds: Callable[[str], Any]) -> None:
    """A random model that may end keeps to the grammar, and ends only where it is complete."""
    requests = [EngineRequest(f"r{seed}", PROMPT, params(grammar, seed=seed, max_tokens=200)) for seed in range(6)]
    ended = [said for said in run(make(), *requests).values() if said[-1] == EOS]
    assert len(ended) >= 3
    for said in ended:
        assert holds(text_of(said)), text_of(said)


def test_greedy_and_penalised_rows_keep_to_it_too(make: Make) -> None:
    """Bias and penalties push, the mask decides."""
    push = dict(logit_bias={7: 100.0}, repetition_penalty=1.5, frequency_penalty=1.0, logprobs=2)
    for temperature in (0.0, 1.5):
        request = EngineRequest("r", PROMPT, params(Grammar("regex", "(yes|no)!"), temperature=temperature, **push))
        assert text_of(run(make(), request)["r.0"]) in ("yes!", "no!")


def test_every_road_gives_the_same_tokens(make: Make) -> None:
    """Neighbours, a pipelined step, a pool that preempts, a resume anywhere: the tokens are the undisturbed ones."""
    mine = EngineRequest("mine", PROMPT, params(JSON, n=3))
    alone = run(make(), mine)
    others = [
        EngineRequest("free", PROMPT[::-1], params(None, ignore_eos=True)),
        EngineRequest("other", PROMPT[5:], params(OTHER)),
    ]
    for engine in (make(), make(depth=1), make(num_blocks=20), make(num_blocks=20, depth=1)):
        together = run(engine, others[0], mine, others[1])
        assert {key: said for key, said in together.items() if key.startswith("mine")} == alone
    assert engine.stats().preemptions > 0
    counts = range(0, max(len(said) for said in alone.values()), 7)
    delivered = {n: {choice: tuple(alone[f"mine.{choice}"][:n]) for choice in range(3)} for n in counts}
    for depth in (0, 1):
        resumed = (EngineRequest(f"after{n}", PROMPT, mine.sampling, delivered[n]) for n in counts)
        rest = run(make(depth=depth), *resumed)
        for n in counts:
            for choice in range(3):
                assert [*delivered[n][choice], *rest.get(f"after{n}.{choice}", [])] == alone[f"mine.{choice}"]


def test_draft_tokens_change_no_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses may be right, wrong, or forbidden by the grammar."""
    requests = [
        EngineRequest("mine", PROMPT, params(JSON, n=3)),
        EngineRequest("free", PROMPT[::-1], params(None, ignore_eos=True)),
        EngineRequest("other", PROMPT[5:], params(OTHER, max_tokens=70)),
    ]
    plain = run(make(), *requests)
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    texts = [[*prompts[key.partition(".")[0]], *said] for key, said in plain.items()]
    draws = random.Random(7)

    def guess(self: PromptLookup, token_ids: list[int], count: int) -> Draft:
        text = next(text for text in texts if text[: len(token_ids)] == token_ids)
        draft = text[len(token_ids) : len(token_ids) + count]
        return Draft(8, [draws.randrange(600) if draws.random() < 0.2 else token for token in draft])

    monkeypatch.setattr(PromptLookup, "draft", guess)
    for blocks in (200, 20):
        engine = make(num_blocks=blocks, drafts=3)
        assert run(engine, *requests) == plain
        stats = engine.stats()
        assert 50 < stats.accepted_draft_tokens < stats.draft_tokens


def test_what_a_grammar_forces_is_drafted(make: Make) -> None:
    """The keys of a schema take fewer steps; what the model may choose, and every token, stays the same."""
    fields = {name: {"type": "boolean"} for name in ("is_green", "has_wheels", "likes_rain", "can_swim")}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    request = EngineRequest("r", PROMPT, params(Grammar("json_schema", json.dumps(schema)), n=2, max_tokens=200))
    plain, drafted = make(), make(drafts=8)
    said = run(plain, request)
    assert set(json.loads(text_of(said["r.0"]))) == set(fields)
    assert run(drafted, request) == said
    stats = drafted.stats()
    assert stats.accepted_draft_tokens > 0.5 * stats.generated_tokens
    assert stats.steps < 0.6 * plain.stats().steps


class SlowMatcher:
    """A matcher that takes 4.5 ms to match a token and a second to say what it forces, on the clock of the fixture."""

    now = 0.0
    num_searches = 0

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def consume_token(self, token_id: int) -> None:
        SlowMatcher.now += 0.0045
        self.matcher.consume_token(token_id)

    def compute_ff_tokens(self) -> list[int]:
        SlowMatcher.now += 1.0
        SlowMatcher.num_searches += 1
        forced: list[int] = self.matcher.compute_ff_tokens()
        return forced


class SlowGrammars(GrammarBackend):
    """Grammars with slow matchers."""

    def create_matcher(self, grammar_id: int, token_ids: Sequence[int] = ()) -> Any:
        return SlowMatcher(super().create_matcher(grammar_id, token_ids))


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time passes in slow matchers alone."""

    def fill(matcher: Any, bits: Any, at: int = 0) -> None:
        fill_next_token_bitmask(matcher.matcher if isinstance(matcher, SlowMatcher) else matcher, bits, at)

    SlowMatcher.num_searches = 0
    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask", fill)
    monkeypatch.setattr("coatcheck.workers.runner.token_bitmask.time.thread_time", lambda: SlowMatcher.now)


@pytest.mark.usefixtures("slow_clock")
def test_tokens_of_one_step_have_the_time_of_as_many_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that keeps to its budget with a token in each step keeps to it with five."""
    request = EngineRequest("r", PROMPT, params(Grammar("regex", "(abc){60}"), max_tokens=200, n=2))
    said = run(make(kind=SlowGrammars), request)
    text = [*PROMPT, *said["r.0"]]

    def guess(self: PromptLookup, token_ids: list[int], count: int) -> Draft:
        return Draft(8, text[len(token_ids) : len(token_ids) + count])

    monkeypatch.setattr(PromptLookup, "draft", guess)
    engine = make(kind=SlowGrammars, drafts=4)
    assert run(engine, request) == said
    assert engine.stats().accepted_draft_tokens > 0.5 * engine.stats().generated_tokens


@pytest.mark.usefixtures("slow_clock")
def test_a_slow_search_for_forced_tokens_is_the_last(make: Make) -> None:
    """No request asked for guesses, so a grammar that is slow to say what it forces is not asked again."""
    request = EngineRequest("r", PROMPT, params(Grammar("regex", "(abc){20}")))
    assert run(make(kind=SlowGrammars, drafts=4), request) == run(make(), request)
    assert SlowMatcher.num_searches == 1


def test_a_finished_choice_of_any_length_can_be_resumed(model: Model) -> None:
    """A request goes on in another group with choices that have ended: their end token may be the 9th, 17th or any."""
    grammars = GrammarBackend.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
    (letter,) = byte_level_tokenizer().encode("a", add_special_tokens=False).ids
    for length in range(1, 20):
        grammars.store(length, grammars.compile_grammar(Grammar("regex", f"a{{{length}}}")))
        grammars.check_resume(length, [letter] * length + [EOS])
        with pytest.raises(InvalidRequest, match="send the tokens that were delivered"):
            grammars.check_resume(length, [letter] * (length - 1) + [EOS])


def answer(communicator: Communicator, path: Path) -> dict[str, list[int]] | None:
    """Rank 0's tokens; the other ranks follow."""
    model = load_model(path, communicator=communicator, device="cpu")
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    grammars = GrammarBackend.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
    pool = allocate_kv_pool(layout, 60, torch.device("cpu"))
    runner = ModelRunner(
        model, layout, pool, max_num_seqs=8, max_model_len=256, grammars=grammars, communicator=communicator
    )
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator)
    engine = Engine(model.spec, group, num_blocks=12, block_size=8, max_num_seqs=8, grammars=grammars)
    large = EngineRequest("large", PROMPT[:9], params(LARGE, max_tokens=9))
    said = run(
        engine, large, EngineRequest("other", PROMPT[5:], params(OTHER)), EngineRequest("r", PROMPT, params(JSON, n=2))
    )
    assert engine.stats().preemptions > 0
    group.stop_followers()
    return said


def test_every_rank_makes_the_same_masks(checkpoint: Path) -> None:
    """Two ranks draw what one draws, of grammars of both compile queues, and also where a sequence begins again."""
    assert run_ranks(2, answer, checkpoint)[0] == answer(Communicator(), checkpoint)
