"""Config.json files as they are published, with what other files than Llama's have and lack."""

from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from tests.cluster.model_configs import DEEPSEEK, LLAMA, write_config

MINIMAX_M2: dict[str, Any] = dict(
    model_type="minimax_m2",
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    num_local_experts=256,
    num_experts_per_tok=8,
    vocab_size=200064,
    max_position_embeddings=196608,
    attn_type_list=[1] * 62,
    torch_dtype="bfloat16",
)
# The text_config of Gemma 3 4B has no heads and no vocabulary: these are the defaults of its class.
GEMMA_3_4B: dict[str, Any] = dict(
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text",
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    ),
    vision_config=dict(model_type="siglip_vision_model"),
    torch_dtype="bfloat16",
)
HUNYUAN_MOE: dict[str, Any] = dict(
    model_type="hunyuan_v1_moe",
    hidden_size=4096,
    intermediate_size=3072,
    moe_intermediate_size=[3072] * 32,
    moe_topk=[8] * 32,
    num_shared_expert=[1] * 32,
    num_experts=64,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128167,
    max_position_embeddings=32768,
    torch_dtype="bfloat16",
)


KIMI_LINEAR: dict[str, Any] = dict(
    model_type="kimi_linear",
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=27,
    num_attention_heads=32,
    num_key_value_heads=32,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
        kda_layers=[n for n in range(1, 27) if n % 4],
        head_dim=128,
        num_heads=32,
        short_conv_kernel_size=4,
    ),
    first_k_dense_replace=1,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    moe_layer_freq=1,
    model_max_length=1048576,
    tie_word_embeddings=False,
    vocab_size=163840,
    dtype="bfloat16",
)


def size(directory: Path, base: dict[str, Any], **settings: Any) -> Sizing:
    return Sizing.of(PlanSettings(model=write_config(directory, base), gpu_memory=2.0**42, **settings))


def test_a_list_of_attention_types_that_are_all_full(tmp_path: Path) -> None:
    """MiniMax-M2 lists its layers' attention in a field that MiniMax-M1 uses for layers with a state."""
    assert size(tmp_path, MINIMAX_M2).cache.whole.bytes_per_token == 62 * 2 * 8 * 128 * 2
    with pytest.raises(InvalidModel, match="config.json has attn_type_list, so some layers keep state"):
        size(tmp_path, MINIMAX_M2 | {"attn_type_list": [0] * 61 + [1]})


def test_layers_with_linear_attention_beside_latents(tmp_path: Path) -> None:
    """Three of four layers of Kimi Linear store no latents, but a state. Its config.json counts layers from 1."""
    sizing = size(tmp_path, KIMI_LINEAR, concurrency=1)
    assert sizing.cache.whole.bytes_per_token == 7 * (512 + 64) * 2
    assert sizing.rank_state_bytes == 20 * (3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4)
    assert sizing.rank_weights.total == pytest.approx(48e9, rel=0.03)
    assert sizing.rank_weights.experts_per_token == 8
    with pytest.raises(InvalidModel, match="config.json has linear_attn_config, so some layers keep state"):
        size(tmp_path, DEEPSEEK | {"linear_attn_config": {"kda_layers": [1, 2, 3]}})


def test_a_text_config_without_the_defaults_of_its_class(tmp_path: Path) -> None:
    """The fields that a multimodal checkpoint lacks are those of the class of its text model."""
    sizing = size(tmp_path, GEMMA_3_4B)
    assert sizing.cache.whole.bytes_per_token == 34 * 2 * 4 * 256 * 2
    assert sizing.rank_weights.total == pytest.approx(3.88e9, rel=0.01)


def test_a_field_with_one_value_for_each_layer(tmp_path: Path) -> None:
    """Equal values count as that value. Different ones are refused by name."""
    sizing = size(tmp_path, HUNYUAN_MOE)
    assert sizing.rank_weights.experts_per_token == 8
    assert sizing.rank_weights.total == pytest.approx(80e9, rel=0.03)
    with pytest.raises(InvalidModel, match=r"has moe_topk \[8, 4\]; it should be a whole number"):
        size(tmp_path, HUNYUAN_MOE | {"moe_topk": [8, 4]})


def test_quantised_weights_without_their_files(tmp_path: Path) -> None:
    """They are counted as if they were not quantised. The refusal and the notes say so, and what to give instead."""
    said = "quantised weights are counted as bfloat16 without MODEL's files: give their bytes with --weights"
    fp8 = write_config(tmp_path, DEEPSEEK | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(InvalidConfig, match=f"raise tp .* or gpu-memory; {said}$"):
        Sizing.of(PlanSettings(model=fp8))
    assert said in size(tmp_path, LLAMA, quantization="int4").notes
    for settings in ({}, {"quantization": "int4", "weights": 2.0**33}):
        assert said not in size(tmp_path, LLAMA, **settings).notes
    with pytest.raises(InvalidConfig, match="or gpu-memory$"):
        Sizing.of(PlanSettings(model=write_config(tmp_path), gpu_memory=2.0**30))


def test_a_memory_without_its_unit_is_refused() -> None:
    """80 would be 80 bytes."""
    for name in ("gpu_memory", "weights"):
        with pytest.raises(InvalidConfig, match="is '80'; write bytes with a unit, such as 80GiB"):
            PlanSettings.build({"model": "m", name: "80"})
