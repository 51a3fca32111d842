"""Embeddings: the pooled hidden states of a prompt, computed in the steps of the other requests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from coatcheck.proto.errors import ContextLengthExceeded
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest, Pooling
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.workers.checkpoints import VOCAB, tiny_checkpoint

PROMPTS = [[(i * 37 + 11 * n) % (VOCAB - 3) + 3 for i in range(length)] for n, length in enumerate((1, 8, 30, 45))]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module")
def make(checkpoint: Path) -> Iterator[Make]:
    """Creates engines, each with a new pool."""
    model = load_model(checkpoint, communicator=Communicator(), device="cpu")

    def make_engine(budget: int = 256, depth: int = 0, num_blocks: int = 200) -> Engine:
        layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
        pool = allocate_kv_pool(layout, num_blocks, torch.device("cpu"))
        runner = ModelRunner(model, layout, pool, max_num_seqs=16, max_model_len=256)
        return Engine(
            model.spec, runner, num_blocks=num_blocks, block_size=8, max_num_seqs=16, max_batch_tokens=budget,
            pipeline_depth=depth,
        )  # fmt: skip

    yield make_engine


def run(engine: Engine, *requests: EngineRequest) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """The embeddings and the tokens of each request."""
    embeddings: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for request in requests:
        engine.submit_request(request)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.embedding:
                assert output.request_id not in embeddings, "an embedding came twice"
                embeddings[output.request_id] = output.embedding
        engine.check()
    return embeddings, tokens


def ask(name: str, prompt: list[int], pooling: Pooling, **more: object) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), ONE_TOKEN, pooling=pooling, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "depth"), [(256, 0), (7, 1)])
def test_embeddings_are_transformers_hidden_states(make: Make, checkpoint: Path, budget: int, depth: int) -> None:
    """The last and the mean hidden state equal those of transformers, in one chunk or many, beside requests that
    generate, and those generate what they do alone."""
    reference = AutoModel.from_pretrained(checkpoint)
    chatty = EngineRequest("chat", tuple(PROMPTS[2]), SamplingParams(max_tokens=9, seed=5, ignore_eos=True))
    requests = [ask(f"{pooling.name}{n}", PROMPTS[n], pooling) for n in range(4) for pooling in list(Pooling)[1:]]
    embeddings, tokens = run(make(budget, depth), chatty, *requests)
    assert tokens["chat"] == run(make(), chatty)[1]["chat"]
    assert len(embeddings) == 8
    for n, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = reference(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(torch.tensor(embeddings[f"LAST{n}"]), states[-1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(embeddings[f"MEAN{n}"]), states.mean(0), atol=1e-5, rtol=1e-5)


def test_embeddings_do_not_depend_on_the_cache_or_a_preemption(make: Make) -> None:
    """A cached prompt, a prompt that is preempted and one that is resumed have the embeddings of a first request."""
    for pooling in (Pooling.LAST, Pooling.MEAN):
        engine = make()
        (first,), (again,) = (run(engine, ask("a", PROMPTS[3], pooling))[0].values() for _ in range(2))
        assert first == pytest.approx(again, abs=1e-5)
        resumed = EngineRequest(
            "a", tuple(PROMPTS[3]), SamplingParams(max_tokens=40, seed=0, ignore_eos=True),
            resume={0: tuple(range(5, 30))}, pooling=pooling,
        )  # fmt: skip
        assert run(engine, resumed)[0]["a"] == pytest.approx(first, abs=1e-5)
        small = make(budget=11, num_blocks=9)
        older = [
            EngineRequest(f"o{n}", tuple(PROMPTS[1]), SamplingParams(max_tokens=24, seed=n, ignore_eos=True))
            for n in range(2)
        ]
        preempted = EngineRequest(
            "a", tuple(PROMPTS[3]), SamplingParams(max_tokens=9, seed=0, ignore_eos=True), pooling=pooling
        )
        assert run(small, *older, preempted)[0]["a"] == pytest.approx(first, abs=1e-5)


def test_the_last_state_uses_the_prefix_cache(make: Make) -> None:
    """With the last token's state a cached prefix is not computed again; the mean needs all of the prompt."""
    for pooling, cached in ((Pooling.LAST, 40), (Pooling.MEAN, 0)):
        engine = make()
        run(engine, ask("a", PROMPTS[3], pooling))
        run(engine, ask("b", PROMPTS[3], pooling))
        assert engine.stats().cached_device_tokens == cached


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_may_have_the_context_s_length(make: Make, depth: int) -> None:
    """A prompt of max_model_len tokens has the embedding of a larger pool, also if it fills its pool; a token more, or
    a second token of output, is refused."""
    prompt = [(i * 31) % (VOCAB - 3) + 3 for i in range(64)]
    last = EngineRequest("last", tuple(prompt), ONE_TOKEN, pooling=Pooling.LAST)
    mean = EngineRequest("mean", tuple(prompt), ONE_TOKEN, pooling=Pooling.MEAN)
    embeddings = run(make(), last, mean)[0]
    engine = make(budget=24, depth=depth, num_blocks=8)
    full = run(engine, last, mean)[0]
    engine.check()
    for name in ("last", "mean"):
        assert full[name] == pytest.approx(embeddings[name], abs=1e-5)
    two = SamplingParams(max_tokens=2, temperature=0.0, seed=0)
    for ids, sampling, pooling in (
        ([*prompt, 5], ONE_TOKEN, Pooling.LAST), (prompt, two, Pooling.LAST), (prompt, ONE_TOKEN, Pooling.NONE),
    ):  # fmt: skip
        with pytest.raises(ContextLengthExceeded, match="64 tokens"):
            engine.submit_request(EngineRequest("long", tuple(ids), sampling, pooling=pooling))
