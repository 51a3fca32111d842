"""The engine over a real model: a request's tokens depend on the request alone."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.block_copier import CpuBlockCopier
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.workers.checkpoints import VOCAB, tiny_checkpoint

PROMPT = [(i * 37 + 11) % (VOCAB - 3) + 3 for i in range(45)]
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    """The loaded model of the checkpoint."""
    return load_model(checkpoint, communicator=Communicator(), device="cpu")


@pytest.fixture(scope="module")
def make(model: Model) -> Make:
    """Creates engines, each with a new pool."""

    def make_engine(num_blocks: int = 200, budget: int = 256, depth: int = 0, host_blocks: int = 0) -> Engine:
        layout, seconds = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32), count()
        pool = allocate_kv_pool(layout, num_blocks, torch.device("cpu"))
        host = allocate_host_pool(host_blocks, layout.bytes_per_block, pool.device) if host_blocks else None
        copier = CpuBlockCopier(pool, host, Communicator()) if host is not None else None
        runner = ModelRunner(model, layout, pool, max_num_seqs=16, max_model_len=256, copier=copier)
        return Engine(
            model.spec,
            runner,
            num_blocks=num_blocks,
            block_size=8,
            max_num_seqs=16,
            max_batch_tokens=budget,
            host_blocks=host_blocks,
            pipeline_depth=depth,
            clock=lambda: float(
                next(seconds)
            ),  # a fixed clock: on a busy machine computing could look cheaper than copying
        )

    return make_engine


def params(**changes: object) -> SamplingParams:
    """Twelve tokens with every sampling parameter that changes a draw."""
    defaults: dict[str, object] = dict(max_tokens=12, seed=2**63 + 5, ignore_eos=True, temperature=0.9)
    return SamplingParams(**{**defaults, **changes})  # type: ignore[arg-type]


RICH = params(
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={17: 2.0, 40: -50.0},
    logprobs=3,
)


def run(engine: Engine, *requests: EngineRequest) -> dict[tuple[str, int], tuple[list[int], list[TokenLogprob]]]:
    """(tokens, logprobs) of every choice."""
    for request in requests:
        engine.submit_request(request)
    said: dict[tuple[str, int], tuple[list[int], list[TokenLogprob]]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = said.setdefault((output.request_id, output.choice), ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs
        engine.check()
    return said


def ask(name: str = "a", prompt: list[int] = PROMPT, sampling: SamplingParams = RICH, **more: object) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), sampling, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(make: Make) -> list[int]:
    """The request's tokens alone on a new engine, prefilled in one chunk."""
    return run(make(), ask())["a", 0][0]


def test_greedy_tokens_are_transformers_own(make: Make, checkpoint: Path) -> None:
    """Greedy tokens equal transformers' generate, token by token, for prompts of many lengths in one batch."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = [PROMPT[: n + 1] for n in range(0, 45, 6)]
    greedy = params(temperature=0.0)
    said = run(make(budget=20), *(ask(f"r{i}", prompt, greedy) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        whole = reference.generate(  # type: ignore[misc]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        # min_new_tokens masks eos in transformers, and our engine may draw it and go on: these prompts do not draw it
        assert said[f"r{i}", 0][0] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "ends"),
    [([5, VOCAB, -1], 7, (5,)), (VOCAB, 7, (7,)), (-1, [7, 10**8], (7,)), ([VOCAB], -1, ())],
)
def test_ends_outside_of_the_vocabulary_end_nothing(
    tmp_path: Path, in_generation_config: object, in_config: object, ends: tuple[int, ...]
) -> None:
    """End tokens outside the vocabulary are dropped: min_tokens masks end tokens, and such a mask would fail."""
    checkpoint = tiny_checkpoint("llama", tmp_path)
    for name, said in (("generation_config.json", in_generation_config), ("config.json", in_config)):
        file = checkpoint / name
        values = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**values, "eos_token_id": said}))
    assert load_model(checkpoint, communicator=Communicator(), device="cpu").spec.eos_token_ids == ends


def test_tokens_do_not_depend_on_the_batch(make: Make, alone: list[int]) -> None:
    """With other requests in the batch, before and after it, the same seed gives the same tokens."""
    others = [ask(f"o{i}", PROMPT[i : i + 20], params(temperature=1.3, seed=i)) for i in range(5)]
    assert run(make(), *others[:3], ask(), *others[3:])["a", 0][0] == alone


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_tokens_do_not_depend_on_chunks(make: Make, alone: list[int], budget: int) -> None:
    """A prompt computed in pieces gives the same tokens as in one."""
    assert run(make(budget=budget), ask())["a", 0][0] == alone


def test_tokens_do_not_depend_on_the_cache(make: Make, alone: list[int]) -> None:
    """A prompt found in the prefix cache gives the same tokens as a cold one."""
    engine = make()
    run(engine, ask())
    assert run(engine, ask("b"))["b", 0][0] == alone
    assert engine.stats().cached_device_tokens == 40


def test_tokens_do_not_depend_on_pipelining(make: Make, alone: list[int]) -> None:
    """Planning a step before the last one's tokens are known gives the same tokens."""
    assert run(make(depth=1), ask())["a", 0][0] == alone


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_tokens_do_not_depend_on_preemption(make: Make, alone: list[int], host_blocks: int) -> None:
    """Preempted sequences, computed again or restored from host memory, have the same tokens."""
    engine = make(num_blocks=12, host_blocks=host_blocks)
    others = [ask(f"o{i}", PROMPT[: 20 + i], params(seed=i, max_tokens=30)) for i in range(4)]
    said = run(engine, *others, ask())
    assert engine.stats().preemptions > 0
    assert (engine.stats().restores > 0) == (host_blocks > 0)
    assert said["a", 0][0] == alone
    assert all(said[f"o{i}", 0] == run(make(), other)[f"o{i}", 0] for i, other in enumerate(others))


def test_a_resumed_request_goes_on_exactly(make: Make, alone: list[int]) -> None:
    """Prompt and delivered tokens on another engine give the remaining tokens, with penalties too."""
    for kept in (1, 5, 11):
        resumed = ask(resume={0: tuple(alone[:kept])})
        assert run(make(), resumed)["a", 0][0] == alone[kept:]


def test_choices_differ_and_repeat(make: Make) -> None:
    """The n samples differ from each other, and are the same the next time."""
    sampling = params(n=4, temperature=1.5)
    first, second = run(make(), ask(sampling=sampling)), run(make(budget=9), ask(sampling=sampling))
    assert first.keys() == {("a", choice) for choice in range(4)}
    assert len({tuple(tokens) for tokens, _ in first.values()}) == 4
    assert {key: tokens for key, (tokens, _) in first.items()} == {key: tokens for key, (tokens, _) in second.items()}


def test_logprobs_are_the_models(make: Make, checkpoint: Path) -> None:
    """Reported logprobs and ranks are those of the model's own distribution at each position."""
    tokens, logprobs = run(make(), ask())["a", 0]
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    for position, (token, reported) in enumerate(zip(tokens, logprobs, strict=True)):
        row = expected[position]
        assert reported.token_id == token
        assert reported.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert reported.rank == int((row > row[token]).sum()) + 1
        assert [i for i, _ in reported.top] == row.topk(3).indices.tolist()


def test_logprobs_of_all_tokens_and_of_named_ones(make: Make, checkpoint: Path) -> None:
    """With -1 each position has the model's whole distribution in float32, also positions of the prompt; named tokens
    come in the order of the request; a batch may mix them with others."""
    engine = make()
    every, named = params(logprobs=-1, prompt_logprobs=-1), params(logprobs=3, logprob_token_ids=(7, 3, 7))
    said = run(engine, ask("every", sampling=every), ask("named", sampling=named), ask("rich"))
    engine.submit_request(ask("prompt", sampling=every))
    scored: list[TokenLogprob] = []
    while engine.has_work:
        for output in engine.step().outputs:
            scored += output.prompt_logprobs
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)

    def expected(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            distribution: torch.Tensor = reference(torch.tensor([PROMPT + tokens])).logits[0].log_softmax(-1)
        return distribution

    tokens, logprobs = said["every", 0]
    assert len(logprobs) == len(tokens) and [entry.token_id for entry in scored] == PROMPT[1:]
    for row, entry in zip(expected(tokens), scored + logprobs, strict=False):
        values = torch.frombuffer(bytearray(entry.all_logprobs), dtype=torch.float32)
        assert torch.allclose(values, row, atol=1e-4) and entry.logprob == values[entry.token_id].item()
        assert not entry.top and entry.rank == int((values > values[entry.token_id]).sum()) + 1
    tokens, logprobs = said["named", 0]
    for row, entry in zip(expected(tokens)[len(PROMPT) - 1 :], logprobs, strict=False):
        assert [token for token, _ in entry.top] == [7, 3, 7] and not entry.all_logprobs
        assert [value for _, value in entry.top] == pytest.approx([row[i].item() for i in (7, 3, 7)], abs=1e-4)
    assert all(len(entry.top) == 3 and not entry.all_logprobs for entry in said["rich", 0][1])


def test_prompt_logprobs_cover_the_prompt(make: Make, checkpoint: Path) -> None:
    """Every prompt token after the first is scored, chunked or not, and even if its prefix was cached."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    engine = make(budget=10)
    run(engine, ask("warm"))
    engine.submit_request(ask(sampling=params(prompt_logprobs=2)))
    scored: list[TokenLogprob] = []
    while engine.has_work:
        for output in engine.step().outputs:
            scored += output.prompt_logprobs
    assert [score.token_id for score in scored] == PROMPT[1:]
    for position, score in enumerate(scored):
        assert score.logprob == pytest.approx(expected[position, score.token_id].item(), abs=1e-4)
        assert len(score.top) == 2


def test_each_prompt_token_is_scored_once_for_all_choices(make: Make) -> None:
    """The later choices compute the prompt themselves if the first has ended, and do not score it again."""
    engine = make()
    engine.submit_request(ask(prompt=PROMPT[:5], sampling=params(prompt_logprobs=0, n=3, max_tokens=1)))
    scored: list[TokenLogprob] = []
    while engine.has_work:
        for output in engine.step().outputs:
            scored += output.prompt_logprobs
    assert [score.token_id for score in scored] == PROMPT[1:5]


def test_min_tokens_holds_stops_back(make: Make) -> None:
    """Before min_tokens no end-of-sequence and no stop token is drawn; after it the first one ends the choice."""
    engine = make()
    sampling = params(
        temperature=2.0, max_tokens=40, min_tokens=10, ignore_eos=False, stop_token_ids=tuple(range(3, 190))
    )
    tokens = run(engine, ask(sampling=sampling))["a", 0][0]
    assert len(tokens) >= 11 and not set(tokens[:10]) & {2, *range(3, 190)}


def test_a_preempted_prompt_is_scored_once(make: Make, checkpoint: Path) -> None:
    """A prompt that is preempted while it is scored, and computed again in other chunks, loses and repeats no score."""
    engine = make(num_blocks=14, budget=16)
    engine.submit_request(ask("old", PROMPT[:30], params(max_tokens=70)))
    for _ in range(3):
        engine.step()
    engine.submit_request(ask(sampling=params(prompt_logprobs=0, max_tokens=40)))
    scored: list[TokenLogprob] = []
    while engine.has_work:
        for output in engine.step().outputs:
            scored += output.prompt_logprobs
        engine.check()
    assert engine.stats().preemptions > 0
    assert [score.token_id for score in scored] == PROMPT[1:]


LIMITED = params(reasoning_limit=ReasoningLimit(5, (), (70, 71)))


def test_reasoning_ends_at_its_limit(make: Make) -> None:
    """The end marker is forced after the limit, whatever the batch, the chunks, a preemption or a resume; the tokens
    before it are those of a request without a limit."""
    free = run(make(), ask(sampling=params()))["a", 0][0]
    limited = run(make(), ask(sampling=LIMITED))["a", 0][0]
    assert limited[:7] == [*free[:5], 70, 71] and len(limited) == 12
    assert run(make(budget=7, depth=1), ask(sampling=LIMITED))["a", 0][0] == limited
    engine = make(num_blocks=12)
    others = [ask(f"o{i}", PROMPT[: 20 + i], params(seed=i, max_tokens=30)) for i in range(4)]
    assert run(engine, *others, ask(sampling=LIMITED))["a", 0][0] == limited
    assert engine.stats().preemptions > 0
    for kept in (3, 5, 6, 9):
        resumed = ask(sampling=LIMITED, resume={0: tuple(limited[:kept])})
        assert run(make(), resumed)["a", 0][0] == limited[kept:]


def test_reasoning_that_ends_or_never_began_is_not_forced(make: Make) -> None:
    """Nothing is forced if the output has the end marker within the limit, or does not begin with the start marker."""
    free = run(make(), ask(sampling=params()))["a", 0][0]
    for limit in (
        ReasoningLimit(5, (), tuple(free[2:4])),
        ReasoningLimit(5, (free[0] + 1,), (70,)),
        ReasoningLimit(12, (), (70,)),
    ):
        assert run(make(), ask(sampling=params(reasoning_limit=limit)))["a", 0][0] == free
    begun = ReasoningLimit(0, tuple(free[:2]), (70,))
    assert run(make(), ask(sampling=params(reasoning_limit=begun)))["a", 0][0][:3] == [*free[:2], 70]


def test_only_allowed_tokens_are_sampled(make: Make) -> None:
    """allowed_token_ids leave no other token, with a logit bias for one that is not allowed too."""
    sampling = params(allowed_token_ids=(10, 20, 30), logit_bias={40: 100.0})
    assert {*run(make(), ask(sampling=sampling))["a", 0][0]} <= {10, 20, 30}


def test_bad_words_are_not_said(make: Make) -> None:
    """A sequence of bad tokens is never completed; its tokens are sampled elsewhere, and the prompt does not count."""
    free = run(make(), ask(sampling=params()))["a", 0][0]
    alone = next(token for token in free[4:] if token not in free[:4])
    bad = (tuple(free[1:4]), (alone,))
    said = run(make(), ask(sampling=params(bad_token_ids=bad)))["a", 0][0]
    assert said[:3] == free[:3] and said[3] != free[3]
    assert alone not in said
    assert all(tuple(said[at : at + 3]) != bad[0] for at in range(12))
    after_prompt = ((PROMPT[-1], free[0]),)
    assert run(make(), ask(sampling=params(bad_token_ids=after_prompt)))["a", 0][0][0] == free[0]
