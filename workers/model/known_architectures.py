"""What transformers supports: model types, causal models, and the fields of config.json with their defaults.

`coatcheck serve` checks config.json against these before Ray starts. This module does not import transformers, because
that imports torch and takes seconds. It reads the names of model types and the defaults of their fields from
transformers' source files. The JSON types of the fields of tested model types are in tables here. A test compares both
with the installed transformers.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel

# {field of a config class: its JSON types, by Python's names}.
_COMMON: Final = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), "int"),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), "int"),
    **dict.fromkeys(("initializer_range", "rms_norm_eps"), "float"),
    **dict.fromkeys(("use_cache", "tie_word_embeddings"), "bool"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "int|None"),
    "eos_token_id": "int|list|None",
    "rope_parameters": "dict|None",
    "attention_dropout": "float|int",
    "hidden_act": "str",
}
_GEMMA: Final = {
    **{name: kinds for name, kinds in _COMMON.items() if name != "hidden_act"},
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar"), "int"),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), "float|None"),
    "attention_bias": "bool",
    "attention_dropout": "float|int|None",
    "hidden_activation": "str",
    "layer_types": "list|None",
    "sliding_window": "int|None",
    "use_bidirectional_attention": "bool|None",
}
_MULTI_HEAD: Final = {"num_key_value_heads": "int|None"}  # None: as many as attention heads
_WINDOW: Final = {"sliding_window": "int|None"}
_QWEN: Final = _COMMON | _WINDOW | {"use_sliding_window": "bool"}
_QWEN_DENSE: Final = _QWEN | _MULTI_HEAD | {"max_window_layers": "int", "layer_types": "list|None"}
_BIASES: Final = {"attention_bias": "bool", "mlp_bias": "bool"}
_MOE: Final = {"num_experts_per_tok": "int", "output_router_logits": "bool", "router_aux_loss_coef": "float"}
_MULTIPLIERS: Final = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")

_LATENT: Final = {  # DeepSeek's latent attention (MLA) and experts
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), "int"),
    "q_lora_rank": "int|None",
    **dict.fromkeys(("moe_intermediate_size", "n_routed_experts", "n_shared_experts"), "int"),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "pretraining_tp"), "int|None"),
    "routed_scaling_factor": "float",
    "norm_topk_prob": "bool|None",
    "output_router_logits": "bool",
    "attention_bias": "bool",
}

# By model type: the fields that its config class declares, and their JSON types.
CONFIG_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "deepseek_v2": _COMMON
    | _MULTI_HEAD
    | _LATENT
    | _BIASES
    | dict.fromkeys(("first_k_dense_replace", "v_head_dim"), "int")
    | {"attention_dropout": "float|None", "head_dim": "int|None", "topk_method": "str|None"},
    "deepseek_v3": _COMMON
    | _MULTI_HEAD
    | _LATENT
    | dict.fromkeys(("first_k_dense_replace", "v_head_dim"), "int|None")
    | {"attention_dropout": "float|int|None", "num_mtp_layers": "int", "rope_interleave": "bool|None"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "granite": _COMMON | _MULTI_HEAD | _BIASES | dict.fromkeys(_MULTIPLIERS, "float|int"),
    "llama": _COMMON
    | _MULTI_HEAD
    | _BIASES
    | {"head_dim": "int|None", "pretraining_tp": "int|None", "attention_dropout": "float|int|None"},
    "mistral": _COMMON | _WINDOW | {"head_dim": "int|None"},
    "mixtral": _COMMON
    | _WINDOW
    | _MOE
    | {"head_dim": "int|None", "num_local_experts": "int", "router_jitter_noise": "float"},
    "olmo2": _COMMON | _MULTI_HEAD | {"attention_bias": "bool"},
    "phi3": _COMMON
    | _MULTI_HEAD
    | _WINDOW
    | {"resid_pdrop": "float|int", "embd_pdrop": "float|int", "original_max_position_embeddings": "int"},
    "qwen2": _QWEN_DENSE,
    "qwen3": _QWEN_DENSE | {"head_dim": "int", "attention_bias": "bool"},
    "qwen3_moe": _QWEN
    | _MOE
    | dict.fromkeys(("decoder_sparse_step", "moe_intermediate_size", "num_experts"), "int")
    | {"attention_bias": "bool", "norm_topk_prob": "bool", "mlp_only_layers": "list|None"},
}

# Model types whose parity tests cover every usual config.json. For these the checks of model_rules.py suffice. A model
# of another type must be built without weights to find out whether it can be served (meta_model.py).
TESTED_MODEL_TYPES: Final = frozenset(CONFIG_FIELDS)

ACTIVATIONS: Final = frozenset(
    (
        "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
        "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
        "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
    )
)  # fmt: skip
ROPE_TYPES: Final = frozenset(("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn"))


def check_known(name: str, model_type: str, *, has_auto_map: bool) -> None:
    """Raise InvalidModel for a model type that transformers does not know. `name`: of the model, for the error.

    `has_auto_map`: whether config.json refers to code in the checkpoint. Accepts every type if transformers' tables
    cannot be read.
    """
    configs = _config_classes()
    if not configs or model_type in configs:
        return
    also = "; code that comes with a checkpoint is never run" if has_auto_map else ""
    raise InvalidModel(
        f"{name}: config.json has model_type {model_type!r}, which transformers {metadata.version('transformers')} "
        f"does not know{also}; install a newer transformers, or correct config.json"
    )


def check_causal(name: str, model_type: str) -> None:
    """Raise InvalidModel for a model type without a causal language model. Accepts types that are not in the tables."""
    configs, models = _config_classes(), _causal_types()
    if not models or model_type not in configs:
        return
    # transformers maps config classes to models, and several model types may share a config class.
    if configs[model_type] not in {configs[causal] for causal in models if causal in configs}:
        raise InvalidModel(
            f"{name}: config.json has model_type {model_type!r}, and transformers {metadata.version('transformers')} "
            "has no causal language model of that type; only decoder-only text models are served"
        )


def fill_class_defaults(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, and the defaults of the config class for those that config.json lacks.

    Leaves out a field that config.json has under another name, and a default that is null or computed. Unchanged for a
    model type whose config class cannot be read.
    """
    defaults, other_names = _class_defaults(model_type)
    given = {other_names.get(name, name) for name in values}
    return {name: value for name, value in defaults.items() if name not in given} | dict(values)


@cache
def _class_defaults(model_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """({field of the config class: its default}, {other name of a field: its name}), from transformers' source."""
    name, models = _config_classes().get(model_type), _transformers_folder() / "models"
    own = models / model_type.replace("-", "_")  # most model types have a folder of their name
    for file in (*own.glob("configuration_*.py"), *sorted(models.glob("*/configuration_*.py"))):
        source = file.read_text(encoding="utf-8")
        if name is not None and f"\nclass {name}(" in source:
            classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
            return _read_class(classes[name])
    return {}, {}


def _read_class(config_class: ast.ClassDef) -> tuple[dict[str, Any], dict[str, str]]:
    """See `_class_defaults`."""
    defaults: dict[str, Any] = {}
    other_names: dict[str, str] = {}
    for node in config_class.body:
        try:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                defaults[node.target.id] = ast.literal_eval(node.value)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "attribute_map":
                other_names = ast.literal_eval(node.value)
        except ValueError:  # not a literal
            continue
    return {name: value for name, value in defaults.items() if value is not None}, other_names


@cache
def _config_classes() -> dict[str, str]:
    """Model type -> config class; empty if transformers' tables cannot be read."""
    source = _read_source("auto_mappings.py") + _read_source("configuration_auto.py")
    return dict(re.findall(r'"([^"]+)"[,:]\s+"(\w+Config)"', source))


@cache
def _causal_types() -> frozenset[str]:
    """The model types with a causal language model; empty if transformers' table cannot be read."""
    table = _read_source("modeling_auto.py").partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    return frozenset(re.findall(r'\(\s*"([^"]+)",', table))


def _read_source(file: str) -> str:
    """The text of a file in transformers/models/auto; "" if it cannot be read."""
    try:
        return (_transformers_folder() / "models" / "auto" / file).read_text(encoding="utf-8")
    except OSError:
        return ""


def _transformers_folder() -> Path:
    package = util.find_spec("transformers")  # does not import transformers
    return Path(str(package and package.origin)).parent
