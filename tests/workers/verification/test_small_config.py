"""Small copies of configs keep what changes the computation, and are small."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.verification.small_config import keep_layers, shrink_config

# Published sizes, by model type; what is left out is the default of transformers' config class.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "gemma3_text": dict(rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in (
        "sliding_attention", "full_attention")}),
    "gemma3n_text": {},
    "gemma4_text": {},
    "glm4_moe": dict(num_hidden_layers=46, first_k_dense_replace=3, n_group=8, topk_group=4),
    "gpt2": {},
    "gpt_oss": {},
    "llama4_text": {},
    "modernbert-decoder": {},
    "phi3": dict(
        max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 48, long_factor=[2.0] * 48,
                             original_max_position_embeddings=4096),
    ),
    "qwen2_moe": dict(mlp_only_layers=[0, 5, 20]),
}  # fmt: skip


def config_of(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


@pytest.mark.parametrize("model_type", _PUBLISHED)
def test_a_small_copy_is_built_and_is_small(model_type: str) -> None:
    """A config of published size gives a model of at most 12 layers and 10 million parameters."""
    small = shrink_config(config_of(model_type, **_PUBLISHED[model_type]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert small.num_hidden_layers <= 12
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000


def test_towers_that_text_does_not_pass_keep_one_layer() -> None:
    """Of phi4_multimodal's audio and vision towers, 470 million parameters of published size, few are built."""
    small = shrink_config(config_of("phi4_multimodal"))
    assert (small.audio_config.num_blocks, small.vision_config.num_hidden_layers) == (1, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 70_000_000


def test_switches_and_kinds_stay() -> None:
    """Switches, layer types, multipliers, soft caps, biases and kinds of rope scaling are those of the model."""
    gemma = config_of("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=144)
    small = shrink_config(gemma)
    assert small.layer_types == gemma.layer_types[:8]
    assert (small.attn_logit_softcapping, small.final_logit_softcapping) == (50.0, 30.0)
    assert small.sliding_window == 16
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
    qwen = config_of(
        "qwen2",
        num_key_value_heads=4,
        rope_parameters=yarn,
        tie_word_embeddings=True,
        use_sliding_window=True,
        max_window_layers=28,
    )
    small = shrink_config(qwen)
    assert small.rope_parameters == yarn | {"original_max_position_embeddings": 32}
    assert small.tie_word_embeddings and small.use_sliding_window
    assert small.num_attention_heads == 4 * small.num_key_value_heads == 8
    granite = config_of("granite", attention_multiplier=0.0078125, embedding_multiplier=12.0, attention_bias=True)
    small = shrink_config(granite)
    assert (small.attention_multiplier, small.embedding_multiplier, small.attention_bias) == (0.0078125, 12.0, True)


def test_a_copy_of_a_quantised_model_is_plain() -> None:
    """The copy has random weights, so it is not quantised, whatever config.json says."""
    config = config_of("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert not hasattr(shrink_config(config), "quantization_config")


def test_heads_wider_than_the_hidden_size_stay_wider() -> None:
    """Heads that together differ from hidden_size differ in the copy, and those that equal it are equal."""
    wide = shrink_config(config_of("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128))
    assert wide.num_attention_heads * wide.head_dim != wide.hidden_size
    plain = shrink_config(config_of("qwen3", hidden_size=2048, num_attention_heads=16, head_dim=128))
    assert plain.num_attention_heads * plain.head_dim == plain.hidden_size


def test_lists_for_each_layer_are_cut() -> None:
    """Lists with an element for each layer, and lists of layers, keep those of the first layers."""
    llama = config_of("llama4_text", num_hidden_layers=48)
    small = shrink_config(llama)
    assert small.no_rope_layers == llama.no_rope_layers[:8]
    assert small.moe_layers == [layer for layer in llama.moe_layers if layer < 8]
    first = keep_layers(small, 3)
    assert (first.num_hidden_layers, first.no_rope_layers) == (3, llama.no_rope_layers[:3])
    assert max(first.moe_layers) < 3


@pytest.mark.parametrize(
    ("model_type", "fields", "layers"),
    [
        ("bamba", dict(attn_layer_indices=[9, 18, 27]), 10),
        ("jamba", {}, 8),
        ("granitemoehybrid", dict(layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4), 8),
        ("nemotron_h", dict(hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-"), 15),
    ],
)
def test_a_copy_has_a_layer_of_every_kind(model_type: str, fields: dict[str, Any], layers: int) -> None:
    """Hybrid models whose first layer with attention comes late keep that layer, and heads that fit the mixer."""
    extra = dict(num_hidden_layers=40) if "layer_types" in fields else {}
    small = shrink_config(config_of(model_type, **fields, **extra))
    assert small.num_hidden_layers == layers
    assert {"linear_attention", "full_attention"} <= set(small.layer_types)


def test_sizes_that_zamba2_computes_fit_its_copy() -> None:
    """Published files have them, too: the copy's are those of its own hidden size and layers."""
    kinds = ["hybrid" if layer in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for layer in range(54)]
    small = shrink_config(config_of("zamba2", layers_block_type=kinds, n_mamba_heads=80))
    assert (small.num_hidden_layers, small.hybrid_layer_ids) == (8, [6])
    assert small.n_mamba_heads * small.mamba_headdim == 2 * small.hidden_size
    assert small.num_attention_heads * small.attention_head_dim == small.attention_hidden_size == 2 * small.hidden_size
    assert keep_layers(small, 4).hybrid_layer_ids == []


def test_a_config_that_has_no_small_copy_is_refused() -> None:
    """A config without the usual fields is refused with its model type."""
    with pytest.raises(InvalidModel, match="clip: no small copy of its config can be made"):
        shrink_config(config_of("clip"))


@pytest.mark.parametrize("model_type", ["falcon_mamba", "mamba", "mamba2"])
def test_a_model_without_attention_has_a_small_copy(model_type: str) -> None:
    """Its heads, if it has any, fit the mixer's width."""
    small = shrink_config(config_of(model_type))
    assert (small.num_hidden_layers, small.hidden_size, small.conv_kernel) == (8, 64, 4)
