"""HybridLayers: what config.json says about layers with a state, and what it may not say."""

from typing import Any

import pytest

from coatcheck.cluster.planner.hybrid_layers import HybridLayers
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidModel


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
        ("jamba", {}, [0, 1, 2, 3]),
        ("jamba", dict(attn_layer_period=3, attn_layer_offset=1), [0, 2, 3]),
        ("mamba", {}, [0, 1, 2, 3]),
        ("mamba2", {}, [0, 1, 2, 3]),
        ("nemotron_h", dict(hybrid_override_pattern="M-*EM", mamba_n_groups=16), [0, 4]),
        ("granitemoehybrid", dict(layers_block_type=["mamba", "attention"] * 2), [0, 2]),
        ("qwen3_5_text", dict(full_attention_interval=2), [0, 2]),
        ("falcon_h1", {}, [0, 1, 2, 3]),
    ],
)
def test_the_layers_with_a_state(model_type: str, fields: dict[str, Any], with_state: list[int]) -> None:
    """Lists of indices, patterns and older names of layer types give the layers of transformers' config."""
    layers = layers_of(model_type, **fields)
    assert [state.layer for state in layers.states] == with_state
