"""Structured output through the engine with a real model: always what was asked for, and the same on every road."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coatcheck.proto.errors import CoatcheckError, DeadlineExceeded, InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.block_layout import BlockLayout
from coatcheck.workers.communicator import Communicator
from coatcheck.workers.device_step import DeviceStep
from coatcheck.workers.engine import Engine
from coatcheck.workers.grammar_lanes import AT_ONCE
from coatcheck.workers.grammar_ledger import MOST_KEPT
from coatcheck.workers.grammars import Compiled, Grammars
from coatcheck.workers.group_runner import GroupRunner, follow
from coatcheck.workers.kv_dtype import KvDtype
from coatcheck.workers.kv_pool import allocate_pool
from coatcheck.workers.model import Model, load_model
from coatcheck.workers.request import Request
from coatcheck.workers.runner import ModelRunner
from coatcheck.workers.step_plan import StepPlan
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.fake_runner import SPEC, FakeRunner
from tests.workers.ranks import run_ranks

EOS = 0
PROMPT = tuple((i * 37 + 11) % 550 + 3 for i in range(30))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
LARGE = Grammar("json_schema", json.dumps({"properties": {f"a{n}": {"type": "null"} for n in range(400)}}))
OTHER = Grammar("regex", "[a-z ]{40,50}")
Make = Callable[..., Engine]


@dataclass(frozen=True)
class OffTheWire:
    """Carries out each plan as other ranks get it; `told` is all that they are."""

    runner: ModelRunner
    told: list[bytes]

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Of this one rank."""
        ints = plan.encode()
        self.told.append(ints.tobytes())
        return self.runner.launch(StepPlan.decode(ints))


def params(grammar: Grammar | None, **changes: Any) -> SamplingParams:
    """Warm sampling, so that every mask matters."""
    return SamplingParams(**{**dict(max_tokens=60, seed=5, temperature=1.0, structured=grammar), **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama with a tokenizer."""
    directory = tmp_path_factory.mktemp("structured")
    return write_model(tiny_checkpoint("llama", directory, vocab_size=600, eos_token_id=EOS, pad_token_id=3))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    """The same, as one rank holds it."""
    return load_model(checkpoint, communicator=Communicator(), device="cpu")


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """Makes an engine with a pool of its own."""

    def make_engine(
        num_blocks: int = 200,
        depth: int = 0,
        kind: type[Grammars] = Grammars,
        grammars_kept: int = MOST_KEPT,
        told: list[bytes] | None = None,
    ) -> Engine:
        layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
        pool = allocate_pool(layout, num_blocks, torch.device("cpu"))
        grammars = kind.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
        runner = ModelRunner(model, layout, pool, max_num_seqs=16, max_model_len=256, grammars=grammars)
        return Engine(
            model.spec, OffTheWire(runner, [] if told is None else told), num_blocks=num_blocks, block_size=8,
            pipeline_depth=depth, max_num_seqs=16, grammars=grammars, grammars_kept=grammars_kept,
        )  # fmt: skip

    return make_engine


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    """Every choice's tokens."""
    said: dict[str, list[int]] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        output = engine.step()
        assert not output.refused
        for part in output.outputs:
            said.setdefault(f"{part.request_id}.{part.choice}", []).extend(part.token_ids)
        engine.check()
    return said


def refusals(engine: Engine) -> list[tuple[str, CoatcheckError]]:
    """All that it refuses until it has nothing to do."""
    refused = []
    while engine.has_work:
        refused += engine.step().refused
        engine.check()
    return refused


def text_of(token_ids: list[int]) -> str:
    """Without the end."""
    text: str = byte_level_tokenizer().decode(token_ids, skip_special_tokens=True)
    return text


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
    requests = [Request(f"r{seed}", PROMPT, params(grammar, seed=seed, max_tokens=200)) for seed in range(6)]
    ended = [said for said in run(make(), *requests).values() if said[-1] == EOS]
    assert len(ended) >= 3
    for said in ended:
        assert holds(text_of(said)), text_of(said)


def test_greedy_and_penalised_rows_keep_to_it_too(make: Make) -> None:
    """Bias and penalties push, the mask decides."""
    push = dict(logit_bias={7: 100.0}, repetition_penalty=1.5, frequency_penalty=1.0, logprobs=2)
    for temperature in (0.0, 1.5):
        request = Request("r", PROMPT, params(Grammar("regex", "(yes|no)!"), temperature=temperature, **push))
        assert text_of(run(make(), request)["r.0"]) in ("yes!", "no!")


def test_every_road_gives_the_same_tokens(make: Make) -> None:
    """Neighbours, a pipelined step, a pool that preempts, a resume anywhere: the tokens are the undisturbed ones."""
    mine = Request("mine", PROMPT, params(JSON, n=3))
    alone = run(make(), mine)
    others = [
        Request("free", PROMPT[::-1], params(None, ignore_eos=True)),
        Request("other", PROMPT[5:], params(OTHER)),
    ]
    for engine in (make(), make(depth=1), make(num_blocks=20), make(num_blocks=20, depth=1)):
        together = run(engine, others[0], mine, others[1])
        assert {key: said for key, said in together.items() if key.startswith("mine")} == alone
    assert engine.stats().preemptions > 0
    longest = max(len(said) for said in alone.values())
    for count in range(0, longest, 7):
        delivered = {choice: tuple(alone[f"mine.{choice}"][:count]) for choice in range(3)}
        for depth in (0, 1):
            rest = run(make(depth=depth), Request("mine", PROMPT, mine.sampling, delivered))
            assert {key: alone[key][:count] + rest.get(key, []) for key in alone} == alone


def test_a_grammar_is_told_once(make: Make) -> None:
    """Its text is in one plan, however many requests and choices have it and however often they begin again; where it
    was forgotten it is told anew, and each group has its own number for it."""
    mine, told = Request("mine", PROMPT, params(JSON, n=3)), list[bytes]()

    def times_told() -> int:
        return sum(plan.count(JSON.text.encode()) for plan in told)

    engine = make(num_blocks=20, grammars_kept=2, told=told)
    first = Request("first", PROMPT[5:], params(OTHER))
    said = run(engine, first, mine, Request("more", PROMPT[::-1], params(JSON)))
    assert engine.stats().preemptions > 0 and times_told() == 1
    alone = run(make(), mine)
    assert {key: said[key] for key in said if key.startswith("mine")} == alone
    run(engine, *(Request(f"{n}", PROMPT[:1], params(Grammar.of_choices([f"{n}"]), max_tokens=1)) for n in range(3)))
    assert run(engine, mine) == alone and times_told() == 2
    delivered = {choice: tuple(alone[f"mine.{choice}"][:9]) for choice in range(3)}
    rest = run(engine, Request("mine", PROMPT, mine.sampling, delivered))
    assert {key: alone[key][:9] + rest[key] for key in alone} == alone


def answer(communicator: Communicator, path: Path) -> dict[str, list[int]] | None:
    """Rank 0's tokens; the other ranks follow."""
    model = load_model(path, communicator=communicator, device="cpu")
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    grammars = Grammars.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
    pool = allocate_pool(layout, 60, torch.device("cpu"))
    runner = ModelRunner(
        model, layout, pool, max_num_seqs=8, max_model_len=256, grammars=grammars, communicator=communicator
    )
    if communicator.rank:
        follow(runner, communicator)
        return None
    group = GroupRunner(runner, communicator)
    engine = Engine(model.spec, group, num_blocks=12, block_size=8, max_num_seqs=8, grammars=grammars)
    large = Request("large", PROMPT[:9], params(LARGE, max_tokens=9))
    said = run(engine, large, Request("other", PROMPT[5:], params(OTHER)), Request("r", PROMPT, params(JSON, n=2)))
    assert engine.stats().preemptions > 0
    group.stop()
    return said


def test_every_rank_makes_the_same_masks(checkpoint: Path) -> None:
    """Two ranks draw what one draws, of grammars in both lanes, and also where a sequence begins again."""
    assert run_ranks(2, answer, checkpoint)[0] == answer(Communicator(), checkpoint)


class HeldGrammars(Grammars):
    """Whose large ones, and those of which a regex begins with "dear", take until `go` is set."""

    go: ClassVar = threading.Event()

    def compile(self, grammar: Grammar) -> Compiled:
        """When it may."""
        if grammar == LARGE or grammar.text.startswith("dear"):
            assert self.go.wait(60)
        return super().compile(grammar)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What HeldGrammars wait for; set at the end, lest their threads outlive the test."""
    HeldGrammars.go.clear()
    yield HeldGrammars.go
    HeldGrammars.go.set()


def steps_until(engine: Engine, name: str) -> list[set[str]]:
    """Who says something in each step, up to the first in which that request does."""
    said: list[set[str]] = []
    while not said or name not in said[-1]:
        said.append({part.request_id for part in engine.step().outputs})
        engine.check()
    return said


def test_nobody_waits_for_another_s_grammar(make: Make, held: threading.Event) -> None:
    """While a grammar is compiled others go on, smaller grammars too; who asks for the same waits with it, who leaves
    is forgotten."""
    engine = make(kind=HeldGrammars)
    engine.submit(Request("free", PROMPT, params(None, ignore_eos=True, max_tokens=200)))
    engine.step()
    mine = [Request(name, PROMPT, params(LARGE, max_tokens=2)) for name in ("one", "two", "gone")]
    for request in mine:
        engine.submit(request)
    engine.abort("gone")
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    for _ in range(5):
        assert [part.request_id for part in engine.step().outputs] == ["free"]
        engine.check()
    engine.submit(Request("small", PROMPT, params(Grammar("regex", "[a-c]{20}"), max_tokens=200)))
    assert all("free" in names and not names & {"one", "two"} for names in steps_until(engine, "small"))
    held.set()
    assert "two" in steps_until(engine, "one")[-1]
    for name in ("free", "small"):
        engine.abort(name)
    assert run(engine, mine[2])["gone.0"] == run(make(), mine[2])["gone.0"]


def test_who_asks_for_many_grammars_does_not_hold_up_others(make: Make, held: threading.Event) -> None:
    """Of one tenant's dear grammars no more than a few are ahead of another's first."""
    engine = make(kind=HeldGrammars)
    for n in range(30):
        engine.submit(Request(f"many {n}", PROMPT, params(Grammar("regex", f"dear{n}"), max_tokens=1), tenant="many"))
    engine.step()
    engine.submit(Request("one", PROMPT, params(Grammar("regex", "[a-c]{20}"), max_tokens=1), tenant="one"))
    held.set()
    answered = set().union(*steps_until(engine, "one"))
    refused = []
    while engine.has_work:
        refused += engine.step().refused
    assert "one" in answered and not refused
    assert len(answered) <= 2 * AT_ONCE[0] + 1


def test_a_grammar_in_use_is_never_compiled_again(make: Make) -> None:
    """However many grammars come after it, one stays for as long as a sequence that may have to begin anew lives; and
    what was forgotten is compiled again beside the steps."""
    compiled: list[str] = []

    class Counted(Grammars):
        def compile(self, grammar: Grammar) -> Compiled:
            compiled.append(grammar.text)
            return super().compile(grammar)

    held = Grammar("regex", "[a-z ]{2000}")
    mine = Request("mine", PROMPT, params(held, max_tokens=200))
    alone = run(make(), mine)
    engine = make(num_blocks=30, kind=Counted, grammars_kept=2)
    engine.submit(mine)
    first = [Request("first", PROMPT[::-1], params(None, ignore_eos=True, max_tokens=170), priority=-1)]
    said: dict[str, list[int]] = {}
    others = [Request(f"{n}", PROMPT[:1], params(Grammar.of_choices([f"{n}"]), max_tokens=1)) for n in range(6)]
    while engine.has_work:
        if "mine" in said:
            while first:
                engine.submit(first.pop())
        while others and engine.stats().preemptions:  # and so mine is yet to begin again
            engine.submit(others.pop())
        for part in engine.step().outputs:
            said.setdefault(part.request_id, []).extend(part.token_ids)
        engine.check()
    assert said["mine"] == alone["mine.0"] and len(said) == 8
    assert compiled.count(held.text) == 1
    forgotten = Grammar.of_choices(["5"])
    run(engine, Request("again", PROMPT[:1], params(forgotten, max_tokens=1)))
    assert compiled.count(forgotten.text) == 2


def test_who_waits_for_a_grammar_has_a_deadline_too(model: Model) -> None:
    """A request whose deadline comes while its grammar is being compiled is refused as any other that has not begun."""
    grammars = Grammars.load(model.directory, vocab_size=600, eos_token_ids=[EOS])
    engine = Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, grammars=grammars)  # none is ever compiled
    engine.submit(Request("late", PROMPT, params(JSON, n=2), seconds_left=0.0))
    ((name, refused),) = engine.step().refused
    assert name == "late" and isinstance(refused, DeadlineExceeded)
    engine.check()
    assert not engine.has_work


def test_what_cannot_be_followed_is_refused(make: Make, model: Model, tmp_path: Path) -> None:
    """A grammar that does not compile, tokens that break it, and a model without a tokenizer: each says so."""
    engine = make()
    for sampling, resume, words in (
        (params(Grammar("regex", "("), n=2), {}, "cannot be compiled"),
        (params(Grammar("regex", "[a-c]+")), {0: (400, 401)}, "resume holds tokens"),
    ):
        request = Request("r", PROMPT, sampling, resume)
        engine.submit(request)
        ((name, refused),) = refusals(engine)  # when it has been compiled
        assert name == "r" and isinstance(refused, InvalidRequest) and re.search(words, str(refused))
        with pytest.raises(InvalidRequest, match=words):  # at once, when it is known
            engine.submit(request)
        assert not engine.has_work
    for grammars, words in (
        (Grammars.load(tmp_path, vocab_size=600, eos_token_ids=[EOS]), "tokenizer cannot be used"),
        (Grammars.load(model.directory, vocab_size=600, eos_token_ids=[]), "no end-of-sequence token"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            Engine(SPEC, FakeRunner(64, 8), num_blocks=64, block_size=8, grammars=grammars).submit(
                Request("r", PROMPT, params(JSON))
            )


def test_a_grammar_that_no_token_goes_on_with_ends_the_request(model: Model, tmp_path: Path) -> None:
    """A vocabulary that lacks the next character cannot go on: the request is refused, its blocks are free."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"Q"})
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(["</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars.load(tmp_path, vocab_size=600, eos_token_ids=[EOS])
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    pool = allocate_pool(layout, 60, torch.device("cpu"))
    runner = ModelRunner(model, layout, pool, max_num_seqs=8, max_model_len=256, grammars=grammars)
    engine = Engine(model.spec, runner, num_blocks=60, block_size=8, max_num_seqs=8, grammars=grammars)
    engine.submit(Request("r", PROMPT, params(Grammar("regex", "abQ|abQd"), n=2)))
    ((name, error),) = refusals(engine)
    assert name == "r" and "make its grammar simpler" in str(error)
    assert engine.stats().blocks_used == 0
