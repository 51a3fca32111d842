"""LoRA adapters in the engine: tokens equal those of transformers with the adapter merged into the weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.kernels.lora.lora_linear import LoraLinear
from coatcheck.proto.errors import InvalidModel, InvalidRequest
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype, choose_kv_dtype
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.lora.adapter_files import greedy, merged_model, write_adapter
from tests.workers.ranks import run_ranks

PROMPT = [(i * 37 + 11) % (VOCAB - 3) + 3 for i in range(45)]
GREEDY = SamplingParams(max_tokens=100, temperature=0.0, seed=1, ignore_eos=True, logprobs=1)
SHORT = SamplingParams(max_tokens=30, temperature=0.0, seed=1, ignore_eos=True, logprobs=1)
Answers = dict[str, tuple[list[int], list[float], int]]


def adapters_of(base: Path, folder: Path) -> list[LoraModule]:
    """Two adapters: all linears of both layers, and two linears of one layer with another rank and alpha."""
    if not folder.exists():
        write_adapter(base, folder / "all", seed=1)
        linears = ("q_proj", "qkv_proj", "down_proj")
        write_adapter(base, folder / "few", seed=2, rank=7, alpha=14.0, linears=linears, layers=[1])
    return [LoraModule("all", str(folder / "all")), LoraModule("few", str(folder / "few"))]


def make_engine(
    model: Model, *, budget: int = 256, blocks: int = 120, communicator: Communicator | None = None
) -> tuple[Engine, Any]:
    layout = BlockLayout.of(model.spec.layers, 8, choose_kv_dtype("auto", model.spec.dtype))
    pool = allocate_kv_pool(layout, blocks, torch.device("cpu"))
    runner: Any = ModelRunner(model, layout, pool, max_num_seqs=8, max_model_len=256)
    if communicator is not None and communicator.size > 1:
        if communicator.rank:
            follow_driver(runner, communicator)
            return None, runner  # type: ignore[return-value]
        runner = TpRunner(runner, communicator)
    engine = Engine(model.spec, runner, num_blocks=blocks, block_size=8, max_num_seqs=8, max_batch_tokens=budget)
    return engine, runner


def ask(adapter: str, prompt: Sequence[int] = PROMPT, sampling: SamplingParams = SHORT, **more: Any) -> EngineRequest:
    return EngineRequest(adapter or "none", tuple(prompt), sampling, adapter=adapter, **more)


def run(engine: Engine, *requests: EngineRequest) -> Answers:
    """(tokens, logprobs, cached tokens) of each request."""
    for request in requests:
        engine.submit_request(request)
    said: Answers = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs, cached = said.get(output.request_id, ([], [], -1))
            tokens, logprobs = tokens + output.token_ids, logprobs + [one.logprob for one in output.logprobs]
            said[output.request_id] = tokens, logprobs, max(cached, output.cached_device_tokens)
        engine.check()
    return said


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama, with heads of a size that --deterministic serves."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("lora"), head_dim=16)


@pytest.fixture(scope="module")
def modules(base: Path) -> list[LoraModule]:
    return adapters_of(base, base.parent / "adapters")


@pytest.fixture(scope="module")
def model(base: Path, modules: list[LoraModule]) -> Model:
    return load_model(base, communicator=Communicator(), device="cpu", lora_modules=modules)


@pytest.fixture(scope="module")
def make(model: Model) -> Callable[..., Engine]:
    """Creates engines over `model`, each with a new pool."""
    return lambda **settings: make_engine(model, **settings)[0]


@pytest.fixture(scope="module")
def make_exact(base: Path, modules: list[LoraModule]) -> Callable[..., Engine]:
    """As `make`, with --deterministic: bits depend neither on chunks nor on other rows."""
    model = load_model(base, communicator=Communicator(), device="cpu", lora_modules=modules, deterministic=True)
    return lambda **settings: make_engine(model, **settings)[0]


@pytest.fixture(scope="module")
def expected(base: Path, modules: list[LoraModule]) -> dict[str, list[int]]:
    """transformers' 100 greedy tokens without an adapter and with each one merged."""
    paths = {"": None, **{module.name: Path(module.path) for module in modules}}
    return {name: greedy(merged_model(base, path), PROMPT, 100) for name, path in paths.items()}


@pytest.fixture(scope="module")
def alone(make_exact: Callable[..., Engine]) -> Answers:
    """Each request alone on a new engine."""
    return {name or "none": run(make_exact(), ask(name))[name or "none"] for name in ("", "all", "few")}


def test_each_row_has_its_adapter(make: Callable[..., Engine], expected: dict[str, list[int]]) -> None:
    """Two adapters and none in one batch give transformers' tokens, and each other ones."""
    said = run(make(), *(ask(name, PROMPT, GREEDY) for name in expected))
    for name, tokens in expected.items():
        assert said[name or "none"][0] == tokens
    assert len({tuple(tokens) for tokens in expected.values()}) == 3


def test_answers_do_not_depend_on_neighbours_or_chunks(make_exact: Callable[..., Engine], alone: Answers) -> None:
    """Tokens and log-probabilities have the same bits alone, beside other adapters, and in chunks of a prompt."""
    for budget in (256, 19):
        said = run(make_exact(budget=budget), ask("few"), ask("", PROMPT), ask("all"))
        for name, (tokens, logprobs, _) in alone.items():
            assert said[name][:2] == (tokens, logprobs)


def test_prefixes_of_adapters_do_not_mix(make_exact: Callable[..., Engine], alone: Answers) -> None:
    """Only the same adapter finds a cached prefix, and its answer then equals the cold one."""
    engine = make_exact()
    for name in ("all", "few", ""):
        assert run(engine, ask(name))[name or "none"][2] == 0
    for name in ("", "all", "few"):
        assert run(engine, ask(name))[name or "none"] == (*alone[name or "none"][:2], 40)


def test_a_resume_continues_with_its_adapter(make_exact: Callable[..., Engine], alone: Answers) -> None:
    """A request with the tokens delivered so far continues as if it had not been lost."""
    tokens = alone["all"][0]
    said = run(make_exact(), ask("all", resume={0: tuple(tokens[:13])}))
    assert said["all"][0] == tokens[13:]


def test_a_preempted_request_keeps_its_adapter(make: Callable[..., Engine], expected: dict[str, list[int]]) -> None:
    """Requests that lose their blocks to one another are computed again with their own adapters."""
    engine = make(blocks=40)
    said = run(engine, *(ask(name, PROMPT, GREEDY) for name in expected))
    assert engine.stats().preemptions > 0
    assert {name: said[name or "none"][0] for name in expected} == expected


def test_an_unknown_adapter_is_refused(make: Callable[..., Engine]) -> None:
    """A request for an adapter that the group lacks is refused, with its name."""
    with pytest.raises(InvalidRequest, match="no LoRA adapter 'other'"):
        make().submit_request(ask("other"))


def answer(communicator: Communicator, argument: tuple[Path, list[LoraModule]]) -> Answers | None:
    """Rank 0's answers of a group."""
    path, modules = argument
    model = load_model(path, communicator=communicator, device="cpu", lora_modules=modules)
    engine, runner = make_engine(model, communicator=communicator)
    if communicator.rank:
        return None
    said = run(engine, *(ask(name, PROMPT, GREEDY) for name in ("few", "", "all")))
    runner.stop_followers()
    return said


def test_two_ranks_give_the_same_tokens(base: Path, modules: list[LoraModule], expected: dict[str, list[int]]) -> None:
    """Ranks that hold slices of the adapters give transformers' tokens too."""
    said = run_ranks(2, answer, (base, modules))[0]
    assert {name: said[name or "none"][0] for name in expected} == expected


def load_own_files(communicator: Communicator, path: tuple[Path, Path]) -> str:
    """The error of a rank whose host has other files of the adapter than rank 0's host."""
    base, folder = path
    modules = [LoraModule("all", str(folder / "same")), LoraModule("few", str(folder / str(communicator.rank)))]
    with pytest.raises(InvalidModel) as refused:
        load_model(base, communicator=communicator, device="cpu", lora_modules=modules)
    return str(refused.value)


def test_hosts_with_different_files_of_an_adapter(base: Path, tmp_path: Path) -> None:
    """Slices of two versions of an adapter would give wrong tokens, so every rank refuses to load them."""
    for name, seed in (("same", 1), ("0", 2), ("1", 3)):
        write_adapter(base, tmp_path / name, seed=seed)
    for error in run_ranks(2, load_own_files, (base, tmp_path)):
        assert "lora-modules few: rank 0 and rank 1 have different files in" in error


@pytest.mark.parametrize("arch", ["phi3", "gemma2", "olmo2", "lfm2", "nemotron-h", "jamba"])
def test_other_architectures(arch: str, tmp_path: Path) -> None:
    """Merged projections, norms behind sublayers, layers of transformers' own code, short convolutions, Mamba-2 and
    Mamba have adapters too."""
    path = tiny_checkpoint(arch, tmp_path)
    modules = adapters_of(path, tmp_path / "adapters")
    model = load_model(path, communicator=Communicator(), device="cpu", lora_modules=modules)
    said = run(make_engine(model)[0], *(ask(name) for name in ("", "all", "few")))
    for module in (None, *modules):
        reference = merged_model(path, module and Path(module.path))
        assert said[module.name if module else "none"][0] == greedy(reference, PROMPT, 30)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_rows_without_an_adapter_keep_their_bits(base: Path, modules: list[LoraModule], quantization: str) -> None:
    """In bfloat16, and over quantised weights, a request without an adapter gets the log-probabilities of a model
    that has no adapters, also beside a request with one, which is changed by its own."""
    settings: dict[str, Any] = dict(
        communicator=Communicator(), device="cpu", dtype="bfloat16", quantization=quantization, deterministic=True
    )
    plain = run(make_engine(load_model(base, **settings))[0], ask(""))["none"]
    beside = run(make_engine(load_model(base, **settings, lora_modules=modules))[0], ask("all"), ask(""))
    assert beside["none"] == plain
    assert beside["all"][0] != plain[0]


def test_memory_of_adapters_counts(model: Model, base: Path) -> None:
    """The weights of a rank include A and B of every adapter, as float32."""
    plain = load_model(base, communicator=Communicator(), device="cpu").spec.weight_bytes
    values = sum(part.numel() for part in _adapter_tensors(model))
    assert model.spec.weight_bytes == plain + 4 * values
    assert [adapter.name for adapter in model.spec.adapters] == ["all", "few"]
    assert len({adapter.fingerprint for adapter in model.spec.adapters}) == 2
    assert KvDtype.FLOAT32 is choose_kv_dtype("auto", "float32")


def _adapter_tensors(model: Model) -> list[torch.Tensor]:
    linears = [linear.lora for linear in model._body.linears() if isinstance(linear.lora, LoraLinear)]
    parts = [part for linear in linears for parts in linear.adapters for part in parts]
    return [tensor for part in parts for tensor in (part.a, part.b)]
