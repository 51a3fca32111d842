"""A plan from config.json alone says what a rank finds when it loads the model: layers, pool, weights."""

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coatcheck.cluster.planner.capacity import KvCacheSpec
from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.plan_table import plan_tables
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.cluster.planner.weight_count import WeightCount, has_experts, ties_head
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.checkpoint.held_weights import held_bytes
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry
from coatcheck.workers.checkpoint.sharding_plan import plan_sharding
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.meta_model import build_meta_model, read_config
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from tests.workers.architecture_sweep import config_of
from tests.workers.checkpoints import ARCHITECTURES, ONE_RANK, tiny_checkpoint, tiny_config
from tests.workers.model.architectures import SERVED, shape_of
from tests.workers.multimodal_checkpoints import write_multimodal
from tests.workers.rank_client import read_registration
from tests.workers.rank_group import RankGroup

# The tiny configs of these have fields, such as num_key_value_heads, that the families do not read and real configs
# lack.
_OTHER_FIELDS = {
    *("biogpt", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "olmoe", "opt"),
}
# Of the families that no parity test covers, those with rules of their own in the planner; the others run in full.
_SAMPLE = {"cohere2", "exaone4", "gemma3n_text", "gemma4_text", "qwen2_moe", "starcoder2"}
OTHERS = sorted(SERVED.keys() - _OTHER_FIELDS - ARCHITECTURES.keys())
# Its shared experts go by a name that a plan does not know.
UNCOUNTED = "hunyuan_v1_moe"


def sampled(names: Iterable[str]) -> list[Any]:
    """Parameters for the families `names`. Those outside of the sample run in full."""
    return [name if name in _SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in names]


@cache
def found(arch: str) -> tuple[Any, list[AttentionLayer]]:
    """The model on the meta device, and what its layers ask of attention."""
    config = tiny_config(arch) if arch in ARCHITECTURES else shape_of(arch, **SERVED[arch])
    model = build_meta_model(config, torch.float32, torch.device("cpu"), 64)
    return model, probe_attention(model)


def read(arch: str) -> ModelConfig:
    return ModelConfig(arch, json.loads(found(arch)[0].config.to_json_string()))


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *sampled(OTHERS)])
def test_layers_are_those_that_the_model_asks_for(arch: str) -> None:
    """Heads, head_dim and window of every layer, on any number of ranks, are what the loaded model's layers have."""
    calls = found(arch)[1]
    shape = ModelShape.of(read(arch))
    assert len(shape.layers) == len(calls)
    for tp in (1, 2, 4):
        shard = TpShard(tp - 1, tp)
        for layer, call in zip(shape.layers, calls, strict=True):
            part = shard.shard_layer(layer)
            assert (part.num_heads, part.num_kv_heads) == shard.local_heads(call)
            assert (part.head_dim, part.sliding_window) == (call.head_dim, call.sliding_window)
            assert part.kv_source == call.kv_source


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_are_what_a_rank_holds(arch: str, tp: int) -> None:
    """A rank's weights, counted from the config, are what its slices hold, within 2%: norms weigh more in tiny ones."""
    model, calls = found(arch)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    slices = plan_sharding(shapes, model.tp_plan, calls, "model.embed_tokens", "lm_head", TpShard(0, tp)).slices
    held = [slices[name].sliced_shape(shape) if name in slices else shape for name, shape in shapes.items()]
    config = read(arch)
    counted = WeightCount.of(config, ModelShape.of(config).expanded, TpShard(0, tp)).total
    assert counted == pytest.approx(sum(torch.Size(shape).numel() for shape in held), rel=0.02)


@pytest.mark.parametrize("arch", sampled(name for name in OTHERS if name != UNCOUNTED))
def test_weights_of_other_families(arch: str) -> None:
    """Beyond what is promised they are within 2%: biases weigh more in tiny models."""
    config = read(arch)
    counted = WeightCount.of(config, ModelShape.of(config).expanded, TpShard(0, 1)).total
    assert counted == pytest.approx(sum(tensor.numel() for tensor in found(arch)[0].parameters()), rel=0.02)


_INTERVAL = dict(moe_layer_start_index=1, moe_layer_interval=2)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("ernie4_5_moe", dict(_INTERVAL)),
        ("ernie4_5_moe", _INTERVAL | dict(moe_layer_end_index=2)),
        ("ernie4_5_moe", {}),
        ("llama4_text", dict(interleave_moe_layer_step=2)),
        ("llama4_text", dict(moe_layers=[0])),
        ("gemma4_text", dict(num_experts=4, moe_intermediate_size=32, top_k_experts=2)),
    ],
)
def test_layers_with_experts_are_those_of_the_model(model_type: str, fields: dict[str, Any]) -> None:
    """Fields of single families say which layers are sparse. The weights are within 2%."""
    config = config_of(model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    sparse = {int(found[1]) for name in names if (found := re.search(r"layers\.(\d+)\.", name))}
    planned = ModelConfig(model_type, json.loads(config.to_json_string()) | {"model_type": model_type})
    assert {index for index in range(config.num_hidden_layers) if has_experts(planned, index)} == sparse
    counted = WeightCount.of(planned, ModelShape.of(planned).expanded, TpShard(0, 1)).total
    assert counted == pytest.approx(sum(tensor.numel() for tensor in model.parameters()), rel=0.02)


def test_a_state_that_gpus_do_not_compute_is_noted(tmp_path: Path) -> None:
    """The plan says what `coatcheck serve` would refuse on a GPU."""
    path = tiny_checkpoint("bamba", tmp_path, mamba_d_state=24)
    notes = Sizing.of(PlanSettings(model=str(path), concurrency=7)).notes
    assert any("power of two from 16 to 256 (here: 24); set --device cpu" in note for note in notes)


@pytest.mark.parametrize(
    "arch",
    [
        "jamba",
        "kimi-linear",
        "minimax",
        "olmo-hybrid",
        "qwen3-next",
        "qwen3.5",
        "qwen3.5-moe",
        *sorted(ONE_RANK.keys() - {"mamba2"}),
    ],
)
def test_a_hybrid_model_has_the_states_and_weights_that_are_planned(arch: str, tmp_path: Path) -> None:
    """Layers with attention, states and their bytes are those of the loaded model, and weights are within 2%."""
    path = tiny_checkpoint(arch, tmp_path)
    spec = load_model(path, communicator=Communicator(), dtype="float32", device="cpu").spec
    config = ModelConfig.open(str(path))
    shape = ModelShape.of(config)
    assert shape.states == spec.state_layers
    assert [(one.num_heads, one.num_kv_heads, one.head_dim) for one in shape.layers] == [
        (one.num_heads, one.num_kv_heads, one.head_dim) for one in spec.layers
    ]
    sizing = Sizing.of(PlanSettings(model=str(path), concurrency=7))
    assert sizing.rank_state_bytes == spec.state_bytes
    without = Sizing.of(PlanSettings(model=str(path), concurrency=7, gpu_memory=sizing.settings.gpu_memory - 2**30))
    assert sizing.num_blocks > without.num_blocks
    total = sizing.num_blocks * sizing.cache.rank.bytes_per_block + sizing.num_snapshots * spec.state_bytes
    alone = Sizing.of(PlanSettings(model=str(path), concurrency=7, state_snapshot_share=0))
    assert alone.num_snapshots == 0 and "no prefix cache" in " ".join(alone.notes)
    assert total == pytest.approx(alone.num_blocks * alone.cache.rank.bytes_per_block, rel=1e-4)
    assert sizing.num_snapshots * spec.state_bytes == pytest.approx(total / 4, rel=1e-3)
    assert "--max-num-seqs 7" in " ".join(sizing.notes)
    assert ("--device cpu" in " ".join(sizing.notes)) == (arch == "jamba")
    small = PlanSettings(model=str(path), context=64, gpu_memory=sizing.weight_bytes + 100 * spec.state_bytes)
    most = Sizing.of(small.model_copy(update={"concurrency": (fits := Sizing.of(small).sequences)}))
    assert most.num_blocks >= fits * most.cache.count_blocks(64) and 2 <= fits < 100
    assert Sizing.of(small.model_copy(update={"concurrency": fits + 1})).sequences == fits
    counted = WeightCount.of(config, shape.expanded, TpShard(0, 1), states=shape.states).total
    assert counted == pytest.approx(spec.num_weights, rel=0.02)
    with pytest.raises(InvalidConfig, match="the states of 1,000,000 sequences take .* lower concurrency"):
        Sizing.of(PlanSettings(model=str(path), concurrency=1_000_000, gpu_memory=2**30))


@pytest.mark.parametrize("arch", ["falcon-mamba", "mamba", "mamba2"])
def test_a_model_without_attention_has_the_states_and_weights_that_are_planned(arch: str, tmp_path: Path) -> None:
    """Its blocks hold nothing and are limited in number; states and weights are those of the loaded model."""
    path = tiny_checkpoint(arch, tmp_path)
    spec = load_model(path, communicator=Communicator(), dtype="float32", device="cpu").spec
    config = ModelConfig.open(str(path))
    shape = ModelShape.of(config)
    assert shape.states == spec.state_layers and shape.layers == spec.layers == ()
    sizing = Sizing.of(PlanSettings(model=str(path), concurrency=7))
    assert sizing.rank_state_bytes == spec.state_bytes
    assert sizing.num_blocks == 1 << 18 and sizing.num_snapshots > 0
    assert "the blocks of the pool hold nothing" in " ".join(sizing.notes)
    assert sizing.to_json()["variants"] == []
    assert not any("With other KV heads" in str(part) for part in plan_tables(sizing).renderables)
    assert Sizing.of(PlanSettings(model=str(path), context=1000)).sequences > 0
    counted = WeightCount.of(config, shape.expanded, TpShard(0, 1), states=shape.states).total
    assert counted == pytest.approx(spec.num_weights, rel=0.02)


@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gemma4"])
def test_the_layout_is_the_ranks_own(name: str, tmp_path: Path) -> None:
    """The block that a plan counts is, byte by byte, the one that a loaded model's pool is made of."""
    path = tiny_checkpoint(name, tmp_path) if name == "gemma3" else write_multimodal(name, tmp_path)
    spec = load_model(path, communicator=Communicator(), dtype="float32", device="cpu").spec
    layers = ModelShape.of(ModelConfig.open(str(path))).layers
    # A loaded model's layers have more fields.
    loaded = [LayerSpec(*(getattr(layer, field.name) for field in fields(LayerSpec))) for layer in spec.layers]
    for kv_dtype in (KvDtype.FLOAT32, KvDtype.BFLOAT16, KvDtype.INT8, KvDtype.INT4):
        planned = KvCacheSpec.of(layers, TpShard(0, 1), 16, kv_dtype).rank
        actual = BlockLayout.of(loaded, 16, kv_dtype)
        assert planned == actual, kv_dtype
        assert allocate_kv_pool(actual, 5, torch.device("cpu")).nbytes == 5 * planned.bytes_per_block


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.full)])
def test_a_running_group_reports_the_planned_blocks(tmp_path: Path, kv_dtype: str) -> None:
    """A group with quantised blocks registers as many of them, and the kv dtype, as the plan says."""
    path = str(tiny_checkpoint("llama", tmp_path, head_dim=64))
    group = RankGroup(GroupConfig("g", path, "tiny", kv_memory=1 << 20, kv_dtype=kv_dtype, device="cpu", threads=1))
    try:
        with grpc.insecure_channel(group.wait_ready()) as channel:
            said = read_registration(channel)
    finally:
        group.kill()
    planned = Sizing.of(PlanSettings(model=path, kv_memory=1 << 20, kv_dtype=kv_dtype))
    assert (said.num_blocks, said.model.kv_dtype) == (planned.num_blocks, planned.cache.whole.kv_dtype)


def test_weights_of_a_loaded_model(tmp_path: Path) -> None:
    """The bytes that a rank has loaded are those planned, within 1%."""
    path = tiny_checkpoint("llama", tmp_path)
    spec = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu").spec
    planned = Sizing.of(PlanSettings(model=str(path), dtype="bfloat16"))
    assert planned.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.01)


def loaded_and_planned(path: Path) -> tuple[int, float]:
    """The bytes of weights that a rank has loaded, and those that a plan counts."""
    loaded = load_model(path, communicator=Communicator(), dtype="bfloat16", device="cpu").spec.weight_bytes
    planned = Sizing.of(PlanSettings(model=str(path), dtype="bfloat16", device="cpu"))
    return loaded, planned.weight_bytes


def test_weights_of_a_vision_tower_are_not_counted(tmp_path: Path) -> None:
    """Of a multimodal checkpoint the plan counts the text model alone, exactly as a rank loads it."""
    loaded, planned = loaded_and_planned(write_multimodal("gemma3", tmp_path))
    assert planned == loaded


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_projections_that_no_layer_uses_are_not_counted(name: str, tmp_path: Path) -> None:
    """Published checkpoints of Gemma 3n have keys' and values' projections also for layers that read an earlier layer's
    keys and values. Neither the plan nor a rank counts these."""
    path = write_multimodal(name, tmp_path)
    plain = loaded_and_planned(path)
    tensors = load_file(path / "model.safetensors")
    source = {key: tensor for key, tensor in tensors.items() if re.search(r"\.1\.self_attn\.[kv]_(proj|norm)\.", key)}
    unused = {key.replace(".1.self_attn", ".3.self_attn"): tensor.clone() for key, tensor in source.items()}
    assert len(unused) >= 3 and not unused.keys() & tensors.keys()
    save_file(tensors | unused, path / "model.safetensors", metadata={"format": "pt"})
    assert loaded_and_planned(path) == plain
    assert plain[0] == plain[1]


def test_gemma_3n_shares_keys_and_values_of_15_layers_by_default() -> None:
    """config.json may lack num_kv_shared_layers: then the projections of Gemma 3n's last 15 layers are not counted."""
    entry = TensorEntry(Path("model.safetensors"), "BF16", (8, 8), 0, 128)
    entries = {f"model.layers.{layer}.self_attn.k_proj.weight": entry for layer in range(20)}
    counts = {
        shared: held_bytes("m", {"model_type": kind, "num_hidden_layers": 20} | shared_field, entries, 2, "cpu")
        for shared, kind, shared_field in (
            ("default", "gemma3n_text", {}), ("two", "gemma3n_text", {"num_kv_shared_layers": 2}),
            ("none", "gemma4_text", {}),
        )
    }  # fmt: skip
    assert counts == {"default": 5 * 128, "two": 18 * 128, "none": 20 * 128}


def test_absent_biases_that_ranks_fill_with_zeros_are_counted(tmp_path: Path) -> None:
    """A.X-K1 is published without the biases by which routers choose experts; a rank holds zeros for them."""
    path = tiny_checkpoint("axk1", tmp_path)
    plain = loaded_and_planned(path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert loaded_and_planned(path) == plain
    assert plain[0] == plain[1]


@pytest.mark.parametrize("differs", [False, True])
def test_a_stored_head_counts_if_it_differs_from_the_embedding(differs: bool, tmp_path: Path) -> None:
    """A rank holds one tensor if the stored head equals the tied embedding, as in Qwen3-0.6B, and both otherwise."""
    path = tiny_checkpoint("llama3-rope", tmp_path)  # config.json ties the head
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = table.flip(0).contiguous() if differs else table.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    loaded, planned = loaded_and_planned(path)
    assert planned == loaded


def test_heads_are_tied_by_default_as_in_transformers() -> None:
    """For every served type whose config.json lacks tie_word_embeddings, the plan uses the config class's default."""
    defaults = {name: bool(CONFIG_MAPPING[name]().tie_word_embeddings) for name in SERVED}
    assert {name: ties_head(fill_defaults(ModelConfig(name, {"model_type": name}))) for name in SERVED} == defaults


def test_the_dtype_of_a_multimodal_checkpoint_is_that_of_the_whole(tmp_path: Path) -> None:
    """Whichever of its two names each part of config.json uses, a plan has the dtype that a rank serves in."""
    values = dict(model_type="gemma3", torch_dtype="bfloat16", text_config=dict(dtype="float32", num_hidden_layers=6))
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).dtype == torch.bfloat16
    fields = ModelConfig.open(str(tmp_path)).values
    assert (fields.get("dtype") or fields.get("torch_dtype")) == "bfloat16"


def test_kv_heads_of_a_gemma_4_without_shared_projections() -> None:
    """num_global_key_value_heads holds only where config.json sets attention_k_eq_v; the default is false."""
    given: dict[str, Any] = dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64
    )
    given |= dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16, global_head_dim=32)
    given |= dict(num_global_key_value_heads=1, hidden_size_per_layer_input=0)
    for more, heads in ({}, 4), (dict(attention_k_eq_v=True), 1):
        fields = {**given, **more}
        config: Any = CONFIG_MAPPING["gemma4_text"].from_dict(fields)
        shape = ModelShape.of(ModelConfig("gemma", {"model_type": "gemma4_text", **fields}))
        written = ModelShape.of(ModelConfig("gemma", {**config.to_dict(), "model_type": "gemma4_text"}))
        assert [layer.num_kv_heads for layer in shape.layers] == [4, heads]
        assert shape.layers == written.layers
