"""The sharding plans of all ranks, computed in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.checkpoint.sharding_plan import ParallelRole, ShardingPlan, plan_sharding
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.meta_model import build_meta_model
from tests.workers.checkpoints import ARCHITECTURES, tiny_config

LAYER = AttentionLayer(module="a", num_heads=8, num_kv_heads=2, head_dim=4, scale=1.0)


@cache
def read_meta_model(arch: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str], list[AttentionLayer]]:
    model = build_meta_model(tiny_config(arch), torch.float32, torch.device("cpu"), 64)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, model.tp_plan, probe_attention(model)


def plan(arch: str, rank: int, size: int, **changes: Any) -> ShardingPlan:
    shapes, tp_plan, layers = read_meta_model(arch)
    arguments: dict[str, Any] = dict(
        shapes=shapes, tp_plan=tp_plan, layers=layers, embedding="model.embed_tokens", lm_head="lm_head"
    )
    return plan_sharding(**(arguments | changes), shard=TpShard(rank, size))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ranks_together_hold_everything(arch: str, size: int) -> None:
    """Every element is on some rank. Only K and V rows are on several ranks, each on equally many."""
    shapes, _, _ = read_meta_model(arch)
    plans = [plan(arch, rank, size) for rank in range(size)]
    for name, shape in shapes.items():
        slices = [p.slices.get(name) for p in plans]
        if slices[0] is None:
            assert slices == [None] * size
            continue
        held = torch.zeros(shape[slices[0].dim], dtype=torch.int64)
        for part in slices:
            assert part is not None
            for start, stop in part.ranges:
                held[start:stop] += 1
        shared = size == 4 and any(part in name for part in ("k_proj", "v_proj", "qkv_proj", "k_norm"))
        assert held.max() == (2 if shared else 1), name
        assert held.min() == (2 if shared and "qkv_proj" not in name else 1), name  # query heads are never shared


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_large_tensors_are_all_sharded(arch: str) -> None:
    """Every matrix is sharded except the routers of experts and the projections to latents, which every rank needs."""
    shapes, _, _ = read_meta_model(arch)
    whole = {name for name, shape in shapes.items() if len(shape) > 1} - plan(arch, 0, 2).slices.keys()
    assert all(name.endswith(("mlp.gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")) for name in whole)


def test_fused_qkv_is_sharded_inside_each_part() -> None:
    """phi3's fused projection gives a rank its query heads, then its keys, then its values."""
    part = plan("phi3", 1, 2).slices["model.layers.0.self_attn.qkv_proj.weight"]
    assert part == TensorSlice(0, ((32, 64), (72, 80), (88, 96)))


def test_few_kv_heads_are_shared_by_neighbours() -> None:
    """With 2 KV heads, ranks 0 and 1 of 4 hold the first and ranks 2 and 3 the second."""
    assert [TpShard(rank, 4).kv_rows(LAYER) for rank in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_norm_over_all_heads_needs_the_group() -> None:
    """olmo2's q and k norms communicate with the other ranks; qwen3's norms of single heads do not."""
    assert plan("olmo2", 0, 2).roles["model.layers.0.self_attn.q_norm"] is ParallelRole.QK_NORM
    assert "model.layers.0.self_attn.q_norm" not in plan("qwen3", 0, 2).roles


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "tp 3 does not divide the attention heads .8.; use a divisor of 8"),
        (16, {}, "tp 16 does not divide the attention heads"),
        (
            5,
            dict(num_attention_heads=10, hidden_size=80),
            "tp 5 is no multiple of the 2 KV heads",
        ),
        (4, dict(intermediate_size=98), "tp 4 does not divide the columns of model.layers.0.mlp.down_proj"),
        (4, dict(vocab_size=5), "tp 4 is too large for a vocabulary of 5"),
    ],
)
def test_tp_that_does_not_divide_is_refused(size: int, changes: dict[str, Any], message: str) -> None:
    """A tp that does not fit the heads, the columns of a matrix or the vocabulary is refused with the reason."""
    config = tiny_config("llama", **changes)
    model = build_meta_model(config, torch.float32, torch.device("cpu"), 64)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidConfig, match=message):
        plan("llama", 0, size, shapes=shapes, tp_plan=model.tp_plan, layers=probe_attention(model))


def test_unknown_splits_are_refused() -> None:
    """With tp 2, a missing tp_plan, an unknown style in the plan and an unknown tensor of attention are refused."""
    with pytest.raises(InvalidModel, match="serve it with tp 1"):
        plan("llama", 0, 2, tp_plan={})
    with pytest.raises(InvalidModel, match="the tensor-parallel style 'diagonal', which is not supported"):
        plan("llama", 0, 2, tp_plan={"model.layers.*.mlp.up_proj": "diagonal"})
    shapes = read_meta_model("llama")[0] | {"model.layers.0.self_attn.gate.weight": (8, 64)}
    with pytest.raises(InvalidModel, match="self_attn.gate.weight .* not a tensor that we can split by heads"):
        plan("llama", 0, 2, shapes=shapes)


def test_an_intersection_is_counted_from_its_start() -> None:
    """`intersect` returns indices relative to the start of the given range."""
    whole = TensorSlice(1, ((0, 4), (8, 12)))
    assert whole.intersect(0, 8) == TensorSlice(1, ((0, 4),))
    assert whole.intersect(8, 16) == TensorSlice(1, ((0, 4),))
    assert whole.sliced_shape((3, 16)) == (3, 8)


@pytest.mark.parametrize("model_type", ["bert", "mpt", "bloom", "recurrent_gemma"])
def test_attention_that_does_not_come_to_us_is_refused(model_type: str) -> None:
    """A model with state outside of the attention interface, or attention that is not causal, is refused."""
    config = CONFIG_MAPPING[model_type](num_hidden_layers=2, vocab_size=99, pad_token_id=0)  # type: ignore[call-arg]
    with pytest.raises(InvalidModel, match=f"{model_type} cannot be served"):
        probe_attention(build_meta_model(config, torch.float32, torch.device("cpu"), 64))
