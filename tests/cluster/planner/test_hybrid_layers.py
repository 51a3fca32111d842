"""HybridLayers: what config.json says about layers with a state, and what it may not say."""

from typing import Any

import pytest

from coatcheck.cluster.planner.hybrid_layers import _STATE_OF, HybridLayers
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.core.model_spec import DeltaNetSpec
from coatcheck.workers.model.model_rules import check_convolutions, check_deterministic_states, check_state_device


def layers_of(model_type: str, **fields: Any) -> HybridLayers:
    values = dict(model_type=model_type, num_hidden_layers=4, hidden_size=256)
    layers = HybridLayers.of(ModelConfig("m", values | fields))
    assert layers is not None
    return layers


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("bamba", dict(attn_layer_indices=1), "attn_layer_indices 1; it should be a list of layer indices"),
        ("bamba", dict(attn_layer_indices="1"), "attn_layer_indices '1'; it should be a list of layer indices"),
        ("lfm2", dict(full_attn_idxs=2), "full_attn_idxs 2; it should be a list of layer indices"),
        ("lfm2", dict(full_attn_idxs=[True]), r"full_attn_idxs \[True\]; it should be a list of layer indices"),
        ("bamba", dict(mamba_n_heads=8, mamba_n_groups=3), "3 groups for 8 Mamba-2 heads; the groups must divide"),
        ("nemotron_h", dict(layer_types=["mamba"], n_groups=3), "3 groups for 128 Mamba-2 heads"),
        ("falcon_h1", dict(mamba_n_heads=8, time_step_limit=[0.1]), r"time_step_limit \[0.1\]; it should be a list"),
        ("nemotron_h", dict(layer_types=["mamba"], time_step_limit=0.1), "time_step_limit 0.1; it should be a list"),
        ("nemotron_h", dict(hybrid_override_pattern="M|*"), r"layers of type \|; nemotron_h is served with"),
    ],
)
def test_fields_that_do_not_fit_are_named(model_type: str, fields: dict[str, Any], message: str) -> None:
    """The refusal has the field and its value."""
    with pytest.raises(InvalidModel, match=message):
        layers_of(model_type, **fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "with_state"),
    [
        ("bamba", dict(attn_layer_indices=[1, 3], mamba_n_heads=8), [0, 2]),
        ("bamba", dict(attn_layer_indices=None), [0, 1, 2, 3]),
        ("lfm2", dict(full_attn_idxs=[2]), [0, 1, 3]),
        ("lfm2", {}, []),
        ("lfm3", {}, [0, 1, 3]),
        ("lfm3", dict(num_hidden_layers=8), [0, 1, 3, 5, 7]),
        ("jamba", {}, [0, 1, 2, 3]),
        ("jamba", dict(attn_layer_period=3, attn_layer_offset=1), [0, 2, 3]),
        ("mamba", {}, [0, 1, 2, 3]),
        ("mamba2", {}, [0, 1, 2, 3]),
        ("minimax", {}, [1, 3]),
        ("nemotron_h", dict(hybrid_override_pattern="M-*EM", mamba_n_groups=16), [0, 4]),
        ("granitemoehybrid", dict(layers_block_type=["mamba", "attention"] * 2), [0, 2]),
        ("qwen3_5_text", dict(full_attention_interval=2), [0, 2]),
        ("falcon_h1", {}, [0, 1, 2, 3]),
        ("zamba2", dict(layers_block_type=["mamba", "hybrid"] * 2), [0, 1, 2, 3]),
    ],
)
def test_the_layers_with_a_state(model_type: str, fields: dict[str, Any], with_state: list[int]) -> None:
    """Lists of indices, patterns and older names of layer types give the layers of transformers' config."""
    layers = layers_of(model_type, **fields)
    assert [state.layer for state in layers.states] == with_state


_KINDS = dict(layer_types=["linear_attention"] * 4)
_CONV = dict(layer_types=["conv"] * 4)
# By model type: the other fields of a config.json, and the field of the convolution's size.
_CONVOLUTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("bamba", {}, "mamba_d_conv"),
    ("falcon_h1", {}, "mamba_d_conv"),
    ("falcon_mamba", {}, "conv_kernel"),
    ("granitemoehybrid", _KINDS, "mamba_d_conv"),
    ("jamba", {}, "mamba_d_conv"),
    ("kimi_linear", {}, "linear_conv_kernel_dim"),
    ("kimi_linear", {}, "linear_attn_config.short_conv_kernel_size"),
    ("lfm2", _CONV, "conv_L_cache"),
    ("lfm2_moe", _CONV, "conv_L_cache"),
    ("lfm3", {}, "conv_L_cache"),
    ("mamba", {}, "conv_kernel"),
    ("mamba2", {}, "conv_kernel"),
    ("nemotron_h", _KINDS, "conv_kernel"),
    ("nemotron_h", _KINDS, "mamba_d_conv"),
    ("olmo_hybrid", _KINDS, "linear_conv_kernel_dim"),
    ("qwen3_5_moe_text", _KINDS, "linear_conv_kernel_dim"),
    ("qwen3_5_text", _KINDS, "linear_conv_kernel_dim"),
    ("qwen3_next", _KINDS, "linear_conv_kernel_dim"),
    ("zamba2", _KINDS, "mamba_d_conv"),
]
# By model type: the other fields, and those of the sizes that GPU kernels do not compute.
_STATES: list[tuple[str, dict[str, Any], str]] = [
    ("bamba", {}, "mamba_d_state"),
    ("falcon_h1", {}, "mamba_d_state"),
    ("granitemoehybrid", _KINDS, "mamba_d_state"),
    ("kimi_linear", {}, "linear_head_dim"),
    ("kimi_linear", {}, "linear_attn_config.head_dim"),
    ("mamba2", {}, "state_size"),
    ("minimax", {}, "head_dim"),
    ("nemotron_h", _KINDS, "ssm_state_size"),
    ("olmo_hybrid", _KINDS, "linear_key_head_dim and linear_value_head_dim"),
    ("qwen3_5_moe_text", _KINDS, "linear_key_head_dim and linear_value_head_dim"),
    ("qwen3_5_text", _KINDS, "linear_key_head_dim and linear_value_head_dim"),
    ("qwen3_next", _KINDS, "linear_key_head_dim and linear_value_head_dim"),
    ("zamba2", _KINDS, "mamba_d_state"),
]


def with_field(fields: dict[str, Any], names: str, size: int) -> dict[str, Any]:
    """`names`: joined by " and "; a dot stands before a field of an object."""
    for name in names.split(" and "):
        outer, _, inner = name.rpartition(".")
        fields = fields | ({outer: {inner: size}} if outer else {inner: size})
    return fields


@pytest.mark.parametrize(("model_type", "fields", "name"), _CONVOLUTIONS)
def test_a_convolution_that_is_refused_is_named_as_in_config_json(
    model_type: str, fields: dict[str, Any], name: str
) -> None:
    """Each family has its own field, and some have another one in published checkpoints."""
    fields = with_field(fields, name, 9)
    with pytest.raises(InvalidModel, match=f"{model_type} with {name} 9 cannot be served.*correct {name},"):
        check_convolutions(model_type, fields, layers_of(model_type, **fields).states)


@pytest.mark.parametrize(("model_type", "fields", "names"), _STATES)
def test_a_state_that_is_refused_is_named_as_in_config_json(
    model_type: str, fields: dict[str, Any], names: str
) -> None:
    """On a GPU, and for delta nets with --deterministic too."""
    fields = with_field(fields, names, 24)
    states = layers_of(model_type, **fields).states
    with pytest.raises(InvalidConfig, match=rf"needs? (a )?{names} (in|that is) .*powers? of two.*here: 24"):
        check_state_device("cuda", model_type, fields, states)
    if isinstance(states[0], DeltaNetSpec):
        with pytest.raises(InvalidConfig, match=f"needs {names} in multiples of 16 .*here: 24, 24"):
            check_deterministic_states(model_type, fields, states)


def test_fields_of_every_family_are_tested() -> None:
    """Families that keep a state have a convolution, except for lightning attention."""
    assert {model_type for model_type, _, _ in _CONVOLUTIONS} == _STATE_OF.keys() - {"minimax"}
