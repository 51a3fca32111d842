"""Grammars through the engine: sent once, compiled beside the steps, kept while in use, or refused."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded, InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.structured import grammar_backend
from coatcheck.workers.structured.grammar_backend import CompiledGrammar, GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_COMPILING
from tests.hostile_grammars import AMBIGUOUS
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.workers.fake_runner import SPEC, FakeRunner
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random llama with a tokenizer."""
    return load_alone(write_checkpoint(tmp_path_factory.mktemp("structured")))


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """Makes engines, each with its own pool."""
    return engines_of(model)


def refusals(engine: Engine) -> list[tuple[str, CoatcheckError]]:
    """What the engine refuses until it has no work."""
    refused = []
    while engine.has_work:
        refused += engine.step().refused
        engine.check()
    return refused


def test_a_grammar_is_sent_once(make: Make) -> None:
    """The text of a grammar is in one plan, however many requests and choices use the grammar and however often they
    are preempted. After ranks have dropped the grammar, the text is sent again."""
    mine, sent = EngineRequest("mine", PROMPT, params(JSON, n=3)), list[bytes]()

    def times_sent() -> int:
        return sum(plan.count(JSON.text.encode()) for plan in sent)

    engine = make(num_blocks=20, grammars_kept=2, sent=sent)
    first = EngineRequest("first", PROMPT[5:], params(OTHER))
    said = run(engine, first, mine, EngineRequest("more", PROMPT[::-1], params(JSON)))
    assert engine.stats().preemptions > 0 and times_sent() == 1
    alone = run(make(), mine)
    assert {key: said[key] for key in said if key.startswith("mine")} == alone
    run(
        engine,
        *(EngineRequest(f"{n}", PROMPT[:1], params(Grammar.of_choices([f"{n}"]), max_tokens=1)) for n in range(3)),
    )
    assert run(engine, mine) == alone and times_sent() == 2
    delivered = {choice: tuple(alone[f"mine.{choice}"][:9]) for choice in range(3)}
    rest = run(engine, EngineRequest("mine", PROMPT, mine.sampling, delivered))
    assert {key: alone[key][:9] + rest[key] for key in alone} == alone


class HeldGrammars(GrammarBackend):
    """A backend that holds large grammars, and regexes that begin with "dear", until `go` is set."""

    go: ClassVar = threading.Event()

    def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """Wait for `go`."""
        if grammar == LARGE or grammar.text.startswith("dear"):
            assert self.go.wait(60)
        return super().compile_grammar(grammar)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """The event that HeldGrammars wait for; set at the end, so that their threads end."""
    HeldGrammars.go.clear()
    yield HeldGrammars.go
    HeldGrammars.go.set()


def steps_until(engine: Engine, name: str) -> list[set[str]]:
    """The requests with output in each step, up to the first step in which request `name` has some."""
    said: list[set[str]] = []
    while not said or name not in said[-1]:
        said.append({part.request_id for part in engine.step().outputs})
        engine.check()
    return said


def test_nobody_waits_for_another_s_grammar(make: Make, held: threading.Event) -> None:
    """While a grammar is compiled other requests go on, also those with smaller grammars. Requests for the same grammar
    wait with it, and aborted ones are dropped."""
    engine = make(kind=HeldGrammars)
    engine.submit_request(EngineRequest("free", PROMPT, params(None, ignore_eos=True, max_tokens=200)))
    engine.step()
    mine = [EngineRequest(name, PROMPT, params(LARGE, max_tokens=2)) for name in ("one", "two", "gone")]
    for request in mine:
        engine.submit_request(request)
    engine.abort_request("gone")
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    for _ in range(5):
        assert [part.request_id for part in engine.step().outputs] == ["free"]
        engine.check()
    engine.submit_request(EngineRequest("small", PROMPT, params(Grammar("regex", "[a-c]{20}"), max_tokens=200)))
    assert all("free" in names and not names & {"one", "two"} for names in steps_until(engine, "small"))
    held.set()
    assert "two" in steps_until(engine, "one")[-1]
    for name in ("free", "small"):
        engine.abort_request(name)
    assert run(engine, mine[2])["gone.0"] == run(make(), mine[2])["gone.0"]


def test_who_asks_for_many_grammars_does_not_hold_up_others(make: Make, held: threading.Event) -> None:
    """At most a few of one tenant's slow grammars are compiled before another tenant's first."""
    engine = make(kind=HeldGrammars)
    for n in range(30):
        engine.submit_request(
            EngineRequest(f"many {n}", PROMPT, params(Grammar("regex", f"dear{n}"), max_tokens=1), tenant="many")
        )
    engine.step()
    engine.submit_request(
        EngineRequest("one", PROMPT, params(Grammar("regex", "[a-c]{20}"), max_tokens=1), tenant="one")
    )
    held.set()
    answered = set().union(*steps_until(engine, "one"))
    refused = []
    while engine.has_work:
        refused += engine.step().refused
    assert "one" in answered and not refused
    assert len(answered) <= 2 * MAX_COMPILING[0] + 1


def test_a_grammar_in_use_is_never_compiled_again(make: Make) -> None:
    """However many grammars come after it, one stays for as long as a sequence that may have to begin anew lives; and
    what was forgotten is compiled again beside the steps."""
    compiled: list[str] = []

    class Counted(GrammarBackend):
        def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
            compiled.append(grammar.text)
            return super().compile_grammar(grammar)

    held = Grammar("regex", "[a-z ]{2000}")
    mine = EngineRequest("mine", PROMPT, params(held, max_tokens=60))
    alone = run(make(), mine)
    engine = make(num_blocks=14, kind=Counted, grammars_kept=2)
    engine.submit_request(mine)
    first = [EngineRequest("first", PROMPT[::-1], params(None, ignore_eos=True, max_tokens=50), priority=-1)]
    said: dict[str, list[int]] = {}
    others = [EngineRequest(f"{n}", PROMPT[:1], params(Grammar.of_choices([f"{n}"]), max_tokens=1)) for n in range(6)]
    while engine.has_work:
        if "mine" in said:
            while first:
                engine.submit_request(first.pop())
        while others and engine.stats().preemptions:  # and so mine is yet to begin again
            engine.submit_request(others.pop())
        for part in engine.step().outputs:
            said.setdefault(part.request_id, []).extend(part.token_ids)
        engine.check()
    assert said["mine"] == alone["mine.0"] and len(said) == 8
    assert compiled.count(held.text) == 1
    forgotten = Grammar.of_choices(["5"])
    run(engine, EngineRequest("again", PROMPT[:1], params(forgotten, max_tokens=1)))
    assert compiled.count(forgotten.text) == 2


def test_who_waits_for_a_grammar_has_a_deadline_too(model: Model) -> None:
    """A request whose deadline passes while its grammar is compiled is refused, as any other that has not started."""
    grammars = GrammarBackend.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
    engine = Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, grammars=grammars)  # none is ever compiled
    engine.submit_request(EngineRequest("late", PROMPT, params(JSON, n=2), seconds_left=0.0))
    ((name, refused),) = engine.step().refused
    assert name == "late" and isinstance(refused, DeadlineExceeded)
    engine.check()
    assert not engine.has_work


def test_what_cannot_be_followed_is_refused(make: Make, model: Model, tmp_path: Path) -> None:
    """A grammar that does not compile, resume tokens that it does not allow, and a model without a tokenizer are
    refused with the reason."""
    engine = make()
    for sampling, resume, words in (
        (params(Grammar("regex", "("), n=2), {}, "cannot be compiled"),
        (params(Grammar("regex", "[a-c]+")), {0: (400, 401)}, "resume has tokens"),
    ):
        request = EngineRequest("r", PROMPT, sampling, resume)  # type: ignore[arg-type]
        engine.submit_request(request)
        ((name, refused),) = refusals(engine)  # when it has been compiled
        assert name == "r" and isinstance(refused, InvalidRequest) and re.search(words, str(refused))
        with pytest.raises(InvalidRequest, match=words):  # at once, when it is known
            engine.submit_request(request)
        assert not engine.has_work
    for grammars, words in (
        (GrammarBackend.load(tmp_path, vocab_size=600, eos_token_ids=[EOS]), "tokenizer cannot be used"),
        (GrammarBackend.load(model.directory, vocab_size=600, eos_token_ids=[]), "no end-of-sequence token"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, grammars=grammars).submit_request(
                EngineRequest("r", PROMPT, params(JSON))
            )


def test_a_grammar_that_no_token_goes_on_with_ends_the_request(model: Model, tmp_path: Path) -> None:
    """If the vocabulary lacks the next character, the request is refused and its blocks are freed."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"Q"})
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(["</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = GrammarBackend.load(tmp_path, vocab_size=600, eos_token_ids=[EOS])
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    pool = allocate_kv_pool(layout, 60, torch.device("cpu"))
    runner = ModelRunner(model, layout, pool, max_num_seqs=8, max_model_len=256, grammars=grammars)
    engine = Engine(model.spec, runner, num_blocks=60, block_size=8, max_num_seqs=8, grammars=grammars)
    engine.submit_request(EngineRequest("r", PROMPT, params(Grammar("regex", "abQ|abQd"), n=2)))
    ((name, error),) = refusals(engine)
    assert name == "r" and "make its grammar simpler" in str(error)
    assert engine.stats().blocks_used == 0


def test_what_takes_too_long_to_follow_ends_alone(make: Make) -> None:
    """An ambiguous grammar takes longer for each token than for the one before: its request is refused when it has
    taken a quarter of a second more than its tokens may take, others go on, and ranks forget it."""
    dropped: list[int] = []

    class Watched(GrammarBackend):
        def drop(self, grammar_id: int) -> None:
            dropped.append(grammar_id)
            super().drop(grammar_id)

    engine = make(kind=Watched)
    engine.submit_request(EngineRequest("free", PROMPT, params(None, ignore_eos=True, max_tokens=200)))
    engine.submit_request(EngineRequest("slow", PROMPT, params(AMBIGUOUS, max_tokens=200, logit_bias={EOS: -100.0})))
    said, refused = Counter[str](), []
    while engine.has_work:
        output = engine.step()
        engine.check()
        refused += output.refused
        for part in output.outputs:
            said[part.request_id] += len(part.token_ids)
    ((name, error),) = refused
    assert name == "slow" and re.search("too hard to follow .it takes [0-9]+ ms for a token", str(error))
    assert said["free"] == 200 and 0 < said["slow"] < 200
    assert dropped == [0]


def test_a_resume_that_takes_too_long_to_follow_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that a request resumes with are followed in one go, within a limit of processor time."""
    monkeypatch.setattr(grammar_backend, "_MAX_RESUME_SECONDS", 0.2)
    engine = make()
    delivered = byte_level_tokenizer().encode("ab" * 90).ids
    engine.submit_request(EngineRequest("r", PROMPT, params(AMBIGUOUS, max_tokens=200), {0: tuple(delivered)}))
    ((name, error),) = refusals(engine)
    assert name == "r" and "tokens of resume against the structured output's grammar takes over 0.2 s" in str(error)


def test_a_grammar_that_fits_no_text_is_refused_before_a_step(make: Make) -> None:
    """The first mask is made where a grammar is compiled, and says so; 4,096 choices are no such grammar."""
    engine = make()
    engine.submit_request(EngineRequest("r", PROMPT, params(Grammar("regex", r"[^\s\S]"))))
    ((name, error),) = refusals(engine)
    assert name == "r" and "cannot be compiled: it allows no further text" in str(error)
    choices = [f"the number {number}" for number in range(4096)]
    (said,) = run(engine, EngineRequest("c", PROMPT, params(Grammar.of_choices(choices)))).values()
    assert text_of(said) in choices
