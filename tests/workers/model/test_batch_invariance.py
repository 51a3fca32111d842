"""Deterministic mode: the bits of a request's results depend neither on the batch nor on the prefix cache."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.kernels.layers.linear import ROW_TILE, PackedLinear
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.meta_model import build_meta_model, check_deterministic, read_config
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.model.architectures import SERVED, write
from tests.workers.ranks import run_ranks

Answers = dict[str, tuple[list[int], list[float]]]

PROMPTS = {f"r{step}": [(i * step + 11) % (VOCAB - 3) + 3 for i in range(40 + step)] for step in (5, 23, 37)}
SAMPLING = SamplingParams(
    max_tokens=8, seed=2**40 + 9, ignore_eos=True, temperature=0.9, top_p=0.95, repetition_penalty=1.2, logprobs=3
)


class Group:
    """One rank of a model's group. On rank 0, `engine` makes an engine with an empty prefix cache."""

    def __init__(self, model: Model, communicator: Communicator, kv_dtype: str) -> None:
        self.model = model
        self.layout = BlockLayout.of(model.spec.layers, 8, choose_kv_dtype(kv_dtype, model.spec.dtype))
        self.runner = ModelRunner(
            model,
            self.layout,
            allocate_kv_pool(self.layout, 80, torch.device("cpu")),
            max_num_seqs=8,
            max_model_len=256,
        )
        self.group = TpRunner(self.runner, communicator) if communicator.size > 1 else self.runner

    def engine(self, *, num_blocks: int = 80, budget: int = 256) -> Engine:
        return Engine(
            self.model.spec, self.group, num_blocks=num_blocks, block_size=8, max_num_seqs=8, max_batch_tokens=budget
        )


def run(engine: Engine, *names: str) -> Answers:
    """Tokens and log-probabilities of requests that are submitted together."""
    for name in names:
        engine.submit_request(EngineRequest(name, tuple(PROMPTS[name]), SAMPLING))
    said: Answers = {name: ([], []) for name in names}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = said[output.request_id]
            tokens += output.token_ids
            for one in output.logprobs:
                logprobs += [one.logprob, *(value for _, value in one.top)]
    return said


def every_way(communicator: Communicator, arguments: tuple[Path, str, str, str]) -> dict[str, Any] | None:
    """Results of the same requests alone, in a batch, chunked, cached, and preempted; None on ranks above 0."""
    path, dtype, kv_dtype, mla_shard = arguments
    model = load_model(
        path, communicator=communicator, dtype=dtype, device="cpu", deterministic=True, mla_shard=mla_shard
    )
    group = Group(model, communicator, kv_dtype)
    if communicator.rank:
        follow_driver(group.runner, communicator)
        return None
    ways: dict[str, Any] = {"alone": {}}
    for name in PROMPTS:
        ways["alone"] |= run(group.engine(), name)
    ways["in a batch"] = run(group.engine(), *PROMPTS)
    ways["chunked"] = run(group.engine(budget=7), *PROMPTS)
    warm = group.engine(budget=31)
    run(warm, *PROMPTS)
    ways["cached"] = run(warm, *reversed(PROMPTS))
    assert warm.stats().cached_device_tokens > 0, "nothing was cached"
    small = group.engine(num_blocks=26, budget=64)
    ways["preempted"] = run(small, *PROMPTS)
    assert small.scheduler.num_preemptions > 0, "nothing was preempted"
    if communicator.size > 1:
        group.group.stop_followers()  # type: ignore[union-attr]  # a TpRunner, since there are others
    return ways


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype", "tp"),
    [
        pytest.param("llama", "bfloat16", "auto", 1, marks=pytest.mark.full),
        ("llama", "float32", "auto", 1),
        pytest.param("gemma2", "bfloat16", "auto", 1, marks=pytest.mark.full),
        ("qwen3", "bfloat16", "int8", 2),
        pytest.param("llama", "bfloat16", "auto", 4, marks=pytest.mark.full),
        ("olmo2", "bfloat16", "auto", 1),
        ("mixtral", "bfloat16", "auto", 1),
        ("qwen3-moe", "float32", "auto", 2),
        ("deepseek-v3", "bfloat16", "fp8", 2),
        ("deepseek-v3 by token", "bfloat16", "fp8", 2),
        pytest.param("deepseek-v3", "float32", "auto", 1, marks=pytest.mark.full),
    ],
)
def test_the_same_bits_in_every_way(tmp_path: Path, arch: str, dtype: str, kv_dtype: str, tp: int) -> None:
    """Alone, in a batch, chunked, cached and preempted, requests have the same tokens and bits of log-probabilities."""
    arch, _, by_token = arch.partition(" by ")
    dense: dict[str, Any] = dict(first_k_dense_replace=9) if arch.startswith("deepseek") else {}
    path = tiny_checkpoint(arch, tmp_path, num_attention_heads=4, **dense)  # heads of 16
    arguments = (path, dtype, kv_dtype, "tokens" if by_token else "replicate")
    ways = every_way(Communicator(), arguments) if tp == 1 else run_ranks(tp, every_way, arguments)[0]
    assert ways is not None
    for way, answers in ways.items():
        for name, answer in ways["alone"].items():
            assert answers[name] == answer, f"{name} {way} differs from {name} alone"


def test_an_unknown_router_is_refused(checkpoint_directory: Path) -> None:
    """Experts behind a router that is transformers' own code are refused, and the message says what to change."""
    path = write("phimoe", checkpoint_directory, **SERVED["phimoe"])
    with pytest.raises(InvalidConfig, match="without --deterministic"):
        load_model(path, communicator=Communicator(), device="cpu", deterministic=True)


def test_on_a_gpu_torchs_norms_are_refused(tmp_path: Path) -> None:
    """torch's norms depend on the batch's size on a GPU. Architectures with fused layers are accepted, and those with
    Mamba-2 or short convolutions, whose norms are replaced."""
    gpu, dtype = torch.device("cuda"), torch.bfloat16
    cases = dict.fromkeys(("llama", "bamba", "falcon-h1", "lfm2", "lfm3"), True) | {"olmo2": False}
    for arch, taken in cases.items():
        config = read_config(tiny_checkpoint(arch, tmp_path / arch))
        causal = build_meta_model(config, dtype, torch.device("cpu"), 64)
        calls = probe_attention(causal)
        with nullcontext() if taken else pytest.raises(InvalidConfig, match="not supported for olmo2"):
            check_deterministic(causal, calls, dtype, gpu)


def test_odd_heads_on_cpu_are_refused(checkpoint_directory: Path) -> None:
    """A head size that the C library lacks is refused, and the message has the size."""
    path = tiny_checkpoint("llama", checkpoint_directory)
    with pytest.raises(InvalidConfig, match="here: 8"):
        load_model(path, communicator=Communicator(), device="cpu", deterministic=True)


def test_float16_on_cpu_is_refused(checkpoint_directory: Path) -> None:
    """float16, which the C library lacks, is refused, and the message says what to change."""
    path = tiny_checkpoint("llama", checkpoint_directory)
    with pytest.raises(InvalidConfig, match="set --dtype"):
        load_model(path, communicator=Communicator(), dtype="float16", device="cpu", deterministic=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_in_tiles_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    """With `batch_invariant` and a library's product, a row has the same bits in any batch."""
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(200, 130).to(dtype), torch.randn(200).to(dtype), batch_invariant=True)
    if linear.form == "native":
        linear.form, linear.parts = "plain", (torch.randn(200, 130).to(dtype),)
    x = torch.randn(3 * ROW_TILE + 5, 130).to(dtype)
    whole = linear(x)
    for first, last in ((0, 1), (3, 9), (ROW_TILE - 1, ROW_TILE + 1), (5, 3 * ROW_TILE)):
        assert torch.equal(linear(x[first:last]), whole[first:last])
    assert linear(x[None, :0]).shape == (1, 0, 200)
