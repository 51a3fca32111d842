"""A config.json with few fields is planned with the defaults of transformers' config classes, for every served type."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.weight_count import WeightCount
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.known_architectures import fill_class_defaults

_FAMILIES = Path(__file__).parents[2] / "workers" / "model" / "families.json"
_SERVED = {name for name, refusal in json.loads(_FAMILIES.read_text())["types"].items() if not refusal}
# Types that a plan does not count: attention with experts, shared experts by another name, and models with parts beside
# the text model. zamba2 differs where its config.json is short; test_plan_equals_model.py compares a full one.
_UNCOUNTED = {"hunyuan_v1_moe", "jetmoe", "moshi", "phi4_multimodal", "zamba2"}
_SIZES = dict(
    hidden_size=512, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=1000, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# What a model of this type needs besides to be built.
_ROPE = dict(rope_type="default", rope_theta=1e4)
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": dict(rope_parameters=dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)),
    "deepseek_v2": dict(head_dim=64),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "gemma3n_text": dict(num_hidden_layers=20),
    "gpt_neo": dict(attention_types=[[["global", "local"], 3]]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 3),
    "hunyuan_v1_dense": dict(head_dim=128),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 3),
    "longcat_flash": dict(num_layers=3, zero_expert_num=4),
    "mamba2": dict(num_heads=16, head_dim=64),
    "ministral": dict(head_dim=128),
    "nemotron_h": dict(layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe", "mlp"]),
}


@pytest.mark.parametrize("model_type", sorted(_SERVED - _UNCOUNTED))
@pytest.mark.parametrize("more", [{}, dict(first_k_dense_replace=2, num_dense_layers=2)], ids=["plain", "dense-first"])
def test_weights_of_a_config_with_few_fields(model_type: str, more: dict[str, Any]) -> None:
    """The weights are within 4% of the model's: norms and biases weigh more in models this small. A type that ignores
    the number of dense first layers is planned without it."""
    config_class = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(config_class)}
    other_names = config_class.attribute_map
    sizes = {other_names.get(name, name): value for name, value in _SIZES.items()}
    fields = {name: value for name, value in sizes.items() if name in declared} | _OWN.get(model_type, {}) | more
    config: Any = config_class.from_dict(dict(fields))
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    actual = sum(tensor.numel() for name, tensor in model.named_parameters() if ".indexer." not in name)
    planned = fill_defaults(ModelConfig.of(model_type, {"model_type": model_type} | fields), with_sizes=False)
    shape = ModelShape.of(planned)
    counted = WeightCount.of(planned, shape.expanded, TpShard(0, 1), states=shape.states).total
    assert counted == pytest.approx(actual, rel=0.04)


def test_a_field_under_its_other_name_has_no_default() -> None:
    """ernie4_5_moe's num_experts is moe_num_experts. A null field keeps null; an unknown type has no defaults."""
    filled = fill_class_defaults("ernie4_5_moe", {"num_experts": 4, "moe_k": None})
    assert "moe_num_experts" not in filled and filled["num_experts"] == 4
    assert filled["moe_k"] is None and filled["moe_layer_start_index"] == 1
    assert fill_class_defaults("no-such-type", {"a": 1}) == {"a": 1}


def test_defaults_are_those_of_the_config_class() -> None:
    """The defaults are read from transformers' source, and equal those of the imported class."""
    for model_type in sorted(_SERVED):
        fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
        defaults = fill_class_defaults(model_type, {})
        assert defaults and {name: fields[name] for name in defaults} == defaults
