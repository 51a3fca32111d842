"""check_config: refuses a config.json that contradicts itself or that transformers would refuse. Imports no torch.

Only for model types that the tests cover. A rank would refuse them too, but after most of a minute and often with an
error of torch. Types and defaults of fields are those of transformers' config classes.
"""

import json
import math
from typing import Any, Final

from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.model.known_architectures import (
    ACTIVATIONS,
    CONFIG_FIELDS,
    ROPE_TYPES,
    TESTED_MODEL_TYPES,
)

_COUNTS: Final = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "num_local_experts", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_MAX_COUNT: Final = 2**31 - 1
# Model types whose config class refuses a hidden_size that is not a multiple of num_attention_heads, with any head_dim.
_HIDDEN_OF_WHOLE_HEADS: Final = {"deepseek_v2", "gemma2", "gemma3_text", "llama"}
_WORDS: Final = {
    "int": "a whole number", "float": "a number with a decimal point", "str": "a text", "bool": "true or false",
    "list": "a list", "dict": "an object", "None": "null",
}  # fmt: skip
_DTYPES: Final = ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
# The required fields of each kind of rotary scaling.
_SCALING: Final = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def check_config(model: ModelConfig) -> None:
    """Raise InvalidModel that names the wrong field, its value and the allowed values."""
    if model.model_type not in TESTED_MODEL_TYPES:
        return
    _check_types(model)
    for name in _COUNTS:
        if (value := model.values.get(name)) is None:
            continue
        if type(value) is not int:  # a field that the config class does not declare
            raise _invalid_field(model, name, value, "a whole number")
        if not 1 <= value <= _MAX_COUNT:
            raise _invalid_field(model, name, value, f"from 1 to {_MAX_COUNT:,}")
    _check_heads(model)
    _check_lookups(model)
    for name in ("rope_parameters", "rope_scaling"):
        _check_scaling(model, name, model.values.get(name))
    _check_single_fields(model)


def _check_types(model: ModelConfig) -> None:
    fields = CONFIG_FIELDS[model.model_type]
    for name, value in model.values.items():
        kinds = fields[name].split("|") if name in fields else []
        kind = "None" if value is None else type(value).__name__
        if name in ("rope_parameters", "rope_scaling"):
            kinds = ["dict", "None"]
        if kinds and kind not in kinds:
            raise _invalid_field(
                model, name, value, " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
            )
        if name in fields and isinstance(value, float) and not math.isfinite(value):
            raise _invalid_field(model, name, value, "a finite number")


def _check_heads(model: ModelConfig) -> None:
    values = model.values
    heads, hidden, head_dim = (values.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if heads and hidden and hidden % heads and model.model_type in _HIDDEN_OF_WHOLE_HEADS:
        raise InvalidModel(
            f"{model.name}: config.json has hidden_size {hidden}, which is not a multiple of its {heads} "
            "num_attention_heads; correct one of them, or fetch config.json again"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    # With partial_rotary_factor only a part of each head is rotated.
    if head_dim and head_dim % 2 and "partial_rotary_factor" not in (*values, *rope):
        raise _invalid_field(model, "head_dim", head_dim, "even, because rotary embeddings rotate pairs")


def _check_lookups(model: ModelConfig) -> None:
    """Check the names that transformers looks up: dtypes and activations."""
    for name in ("dtype", "torch_dtype"):
        dtype = model.values.get(name)
        if dtype is not None and dtype not in _DTYPES and not str(dtype).startswith("float8_e"):
            raise _invalid_field(model, name, dtype, f"one of {', '.join(_DTYPES[:3])}")
    for name in ("hidden_act", "hidden_activation"):
        activation = model.values.get(name)
        if name in CONFIG_FIELDS[model.model_type] and activation is not None and activation not in ACTIVATIONS:
            raise _invalid_field(model, name, activation, "an activation that transformers knows, such as silu")


def _check_scaling(model: ModelConfig, name: str, scaling: Any) -> None:
    """`scaling`: the parameters of one rope type, or a dict of them by kind of layer."""
    if not isinstance(scaling, dict):
        return
    for layers, inner in scaling.items():
        if isinstance(inner, dict):
            _check_scaling(model, f"{name}.{layers}", inner)
    if any(isinstance(inner, dict) for inner in scaling.values()):
        return
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if model.model_type == "phi3" and kind in ("su", "yarn"):  # older names of longrope
        kind = "longrope"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise _invalid_field(model, f"{name}.rope_type", kind, f"one of {', '.join(sorted(ROPE_TYPES))}")
    for part in _SCALING.get(kind, ()):
        value = scaling.get(part)
        if part.endswith("_factor") and kind == "longrope":
            if not isinstance(value, list):
                raise _invalid_field(model, f"{name}.{part}", value, f"a list of numbers for rope_type {kind}")
        elif not _is_positive(value):
            raise _invalid_field(model, f"{name}.{part}", value, f"a number above 0 for rope_type {kind}")
    if "rope_theta" in scaling and not _is_positive(scaling["rope_theta"]):
        raise _invalid_field(model, f"{name}.rope_theta", scaling["rope_theta"], "a number above 0")


def _check_single_fields(model: ModelConfig) -> None:
    values = model.values
    if "rope_theta" in values and not _is_positive(values["rope_theta"]) and not values.get("rope_parameters"):
        raise _invalid_field(model, "rope_theta", values["rope_theta"], "a number above 0")
    if isinstance(epsilon := values.get("rms_norm_eps"), float) and epsilon < 0:
        raise _invalid_field(model, "rms_norm_eps", epsilon, "at least 0")
    ends = values.get("eos_token_id")
    if isinstance(ends, list) and not all(type(end) is int for end in ends):
        raise _invalid_field(model, "eos_token_id", ends, "a token id or a list of them")
    padding, vocabulary = values.get("pad_token_id"), values.get("vocab_size")
    if isinstance(padding, int) and vocabulary is not None and not -vocabulary <= padding < vocabulary:
        raise _invalid_field(model, "pad_token_id", padding, f"below vocab_size ({vocabulary}), or null")
    experts = values.get("num_local_experts") or values.get("num_experts")
    if experts and (values.get("num_experts_per_tok") or 0) > experts:
        raise _invalid_field(
            model, "num_experts_per_tok", values["num_experts_per_tok"], f"at most its {experts} experts"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _invalid_field(model: ModelConfig, name: str, value: Any, allowed: str) -> InvalidModel:
    return InvalidModel(
        f"{model.name}: config.json has {name} {json.dumps(value)}; it must be {allowed}: correct it, or "
        "fetch config.json again"
    )
