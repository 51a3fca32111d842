"""MixtureOfExperts against transformers' blocks, and whole models of these blocks on several ranks."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.checkpoint.sharding_plan import plan_sharding
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.model import load_model
from coatcheck.workers.model.sparse_mlp import (
    ExpertsAdapter,
    MixtureOfExperts,
    PackedBlock,
    check_expert_parallel,
    is_known_block,
)
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.model.architectures import shape_of
from tests.workers.ranks import run_ranks

_GROUPS = dict(n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=32)
_DEEPSEEK = _GROUPS | dict(n_shared_experts=2, first_k_dense_replace=0, routed_scaling_factor=2.5)
_LATENT = dict(kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
_QWEN = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32)
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("deepseek_v2", _DEEPSEEK | _LATENT | dict(topk_method="group_limited_greedy")),
    "deepseek-v2-lite": ("deepseek_v2", _DEEPSEEK | _LATENT | dict(topk_method="greedy")),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK | _LATENT | dict(norm_topk_prob=True)),
    "deepseek-v3-plain": ("deepseek_v3", _DEEPSEEK | _LATENT | dict(norm_topk_prob=False)),
    "dots1": ("dots1", _DEEPSEEK),
    "glm4-moe": ("glm4_moe", _DEEPSEEK | dict(n_group=1, topk_group=1)),
    "gpt-oss": ("gpt_oss", dict(num_local_experts=6, num_experts_per_tok=3, head_dim=16)),
    "minimax": ("minimax", dict(num_local_experts=6, num_experts_per_tok=3)),
    "mixtral": ("mixtral", dict(num_local_experts=6, num_experts_per_tok=3)),
    "olmoe": ("olmoe", _QWEN),
    "qwen2-moe": ("qwen2_moe", _QWEN | dict(shared_expert_intermediate_size=48, norm_topk_prob=False)),
    "qwen3-moe": ("qwen3_moe", _QWEN | dict(norm_topk_prob=True, hidden_act="gelu_pytorch_tanh")),
}
PROMPT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()


def block_of(name: str) -> nn.Module:
    """transformers' block with random weights; all experts and groups are chosen for some token."""
    model_type, shape = BLOCKS[name]
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(shape_of(model_type, **shape), dtype=torch.float32)
    block: nn.Module = model.model.layers[-1].mlp
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(std=0.3)
    return block


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_block_equals_transformers(name: str, tokens: int) -> None:
    """In float32 our mixture of experts gives the outputs of transformers' block."""
    block = block_of(name)
    assert is_known_block(block)
    x = torch.randn(tokens, 64)
    with torch.inference_mode():
        wanted = block(x[None])
        ours = PackedBlock(block, batch_invariant=False)(x[None])
    if name == "gpt-oss":
        wanted, ours = wanted[0], ours[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral", "qwen2-moe", "gpt-oss"])
def test_a_token_does_not_depend_on_its_neighbours(name: str) -> None:
    """A token has the same bits alone and beside others, in bfloat16 and in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        moe = MixtureOfExperts(block_of(name).to(dtype), batch_invariant=True)
        x = torch.randn(50, 64).to(dtype)
        whole = moe(x)
        for first, last in ((0, 1), (7, 20), (3, 50)):
            assert torch.equal(moe(x[first:last]), whole[first:last])


@pytest.mark.parametrize("model_type", ["glm4_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_layers_with_known_blocks_are_fused(model_type: str, checkpoint_directory: Path) -> None:
    """These architectures run our decoder layers, so that CUDA graphs capture them."""
    path = checkpoint_of(model_type, checkpoint_directory)
    assert load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu").supports_cuda_graphs


def test_other_routers_keep_transformers_code(checkpoint_directory: Path) -> None:
    """phimoe chooses experts in its own way: only its experts' products are ours."""
    shape = shape_of("phimoe", num_local_experts=4, sliding_window=16)
    path = tiny_checkpoint("phimoe", checkpoint_directory, config=shape)
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
    block = model._body.base.layers[0].mlp  # type: ignore[attr-defined]
    assert not isinstance(block, PackedBlock) and isinstance(block.experts, ExpertsAdapter)


def test_tokens_of_experts_are_counted_where_layers_have_different_numbers(
    checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of layers with four experts and of layers with six are added expert by expert."""
    models = [
        load_model(
            checkpoint_of(name, checkpoint_directory), communicator=Communicator(), dtype="float32", device="cpu"
        )
        for name in ("mixtral", "qwen3_moe")
    ]
    for model in models:
        driver = PagedDriver(model)
        driver.step([(driver.add_sequence(PROMPT, 0), len(PROMPT))])
    four, six = (model.expert_tokens() for model in models)
    assert (len(four), len(six)) == (4, 6)
    assert any(four) and any(six)
    both = [layer for model in models for layer in model._body.experts()]
    monkeypatch.setattr(models[0]._body, "experts", lambda: both)
    assert models[0].expert_tokens() == [a + b for a, b in zip([*four, 0, 0], six, strict=True)]


_FAMILIES: dict[str, dict[str, Any]] = {
    "dots1": _DEEPSEEK | dict(first_k_dense_replace=1, head_dim=16, moe_intermediate_size=48),
    "glm4_moe": _DEEPSEEK | dict(first_k_dense_replace=1, use_qk_norm=True, head_dim=16, moe_intermediate_size=48),
    "gpt_oss": dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _QWEN,
    "qwen2_moe": _QWEN | dict(shared_expert_intermediate_size=48, mlp_only_layers=[1]),
    "qwen3_moe": _QWEN | dict(norm_topk_prob=True, head_dim=16, decoder_sparse_step=2),
}  # fmt: skip


def checkpoint_of(model_type: str, directory: Path) -> Path:
    limits = dict(num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, vocab_size=VOCAB)
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3) | limits | _FAMILIES[model_type]
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = CONFIG_MAPPING[model_type](**(shape | tokens))
    return tiny_checkpoint(f"experts-{model_type}", directory, config=config)


@cache
def expected(path: Path) -> list[int]:
    """transformers' greedy tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)  # type: ignore[misc]
    return list(out[0, len(PROMPT) :].tolist())


def run_models(communicator: Communicator, arguments: tuple[dict[str, Path], bool]) -> dict[str, tuple[list[int], int]]:
    """The work of one rank: (greedy tokens, bytes of weights) of every model, beside another prompt."""
    answers = {}
    paths, expert_parallel = arguments
    for name, path in paths.items():
        model = load_model(
            path, communicator=communicator, dtype="float32", device="cpu", expert_parallel=expert_parallel
        )
        tokens = PagedDriver(model).greedy([PROMPT, PROMPT[::-1][:23]], 10, chunk=16)
        answers[name] = tokens[0], model.spec.weight_bytes
    return answers


@pytest.mark.parametrize(
    ("tp", "expert_parallel"),
    [(1, False), (2, False), (2, True), *(pytest.param(4, ep, marks=pytest.mark.full) for ep in (False, True))],
)
def test_greedy_tokens_equal_transformers(tp: int, expert_parallel: bool, checkpoint_directory: Path) -> None:
    """Prompts in chunks, beside another one, give transformers' tokens on every rank, which holds its part."""
    names = [
        name for name in _FAMILIES if not (expert_parallel and tp == 4 and _FAMILIES[name].get("num_experts") == 6)
    ]
    paths = {name: checkpoint_of(name, checkpoint_directory) for name in names}
    arguments = (paths, expert_parallel)
    ranks = [run_models(Communicator(), arguments)] if tp == 1 else run_ranks(tp, run_models, arguments)
    for answers in ranks:
        for name, (tokens, weight_bytes) in answers.items():
            assert tokens == expected(paths[name]), name
            stored = sum(file.stat().st_size for file in paths[name].glob("*.safetensors"))
            assert tp == 1 or weight_bytes < 0.7 * stored, name


@pytest.mark.parametrize(
    ("model_type", "shape", "tp", "said"),
    [
        (
            "mixtral",
            dict(num_local_experts=6),
            4,
            r"tp 4 does not divide the experts of model.layers.0.mlp.experts \(6\)",
        ),
        ("llama", {}, 2, "llama has no experts; leave --expert-parallel out"),
        ("jetmoe", dict(num_local_experts=4), 2, "model.layers.0.*experts of jetmoe runs transformers' own code"),
    ],
)
def test_experts_that_cannot_be_placed_are_refused(model_type: str, shape: dict[str, Any], tp: int, said: str) -> None:
    """A number of experts that tp does not divide, and a model without experts of ours, are refused with the reason."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(model_type, **shape))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidConfig, match=said):
        check_expert_parallel(model)
        plan_sharding(shapes, model.tp_plan, [], "model.embed_tokens", "lm_head", TpShard(0, tp), expert_parallel=True)


def test_a_rank_reads_only_its_experts(checkpoint_directory: Path) -> None:
    """With --expert-parallel the progress of loading counts the bytes of the rank's own experts alone."""
    path = checkpoint_of("mixtral", checkpoint_directory)
    for totals in run_ranks(2, bytes_to_read, path):
        assert totals[1] == totals[0]


def bytes_to_read(communicator: Communicator, path: Path) -> list[int]:
    """The bytes that this rank reads with tensor-sliced experts, and with whole experts."""
    totals: dict[bool, int] = {}
    for expert_parallel in (False, True):
        load_model(
            path, communicator=communicator, dtype="float32", device="cpu", expert_parallel=expert_parallel,
            progress=lambda done, total, key=expert_parallel: totals.update({key: total}),  # type: ignore[misc]
        )  # fmt: skip
    return [totals[False], totals[True]]
