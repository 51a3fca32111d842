"""TensorCheck: whether a checkpoint's tensors are those that its config.json promises, from safetensors headers alone.

Only for model types that the tests cover, and of their tensors only embeddings, heads, projections and norms, under the
names that checkpoints have them: a rank has the last word. It says what a rank says, before Ray starts.
"""

import re
from collections.abc import Mapping
from typing import Final

from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry
from coatcheck.workers.model.known_architectures import TESTED_MODEL_TYPES, config_fields

Shape = tuple[int, ...]

_IN_LAYER: Final = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_EXPERTS: Final = ("mixtral", "qwen3_moe")


def check_tensors(model: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """Raises InvalidModel for a tensor of another shape than config.json promises, or one that is missing. `model` has
    the defaults of its class."""
    if model.model_type not in TESTED_MODEL_TYPES:
        return
    layers = ModelShape.of(model).layers
    inside, outside = _shapes_inside(model), _shapes_outside(model)
    prefixes = {found[1] for name in entries if (found := _IN_LAYER.fullmatch(name)) and found[3] in inside}
    if len(prefixes) != 1:  # under names that we do not know
        return
    (prefix,) = prefixes
    base = prefix.removesuffix("layers")
    promised = {f"{prefix}.{layer}.{name}": shape for layer in range(len(layers)) for name, shape in inside.items()}
    promised |= {f"{base}{name}": shape for name, shape in outside.items()}
    if not model.values.get("tie_word_embeddings"):
        promised["lm_head.weight"] = outside["embed_tokens.weight"]
    for name, shape in promised.items():
        if name in entries and entries[name].shape != shape:
            raise InvalidModel(
                f"{model.name}: tensor {name} has shape {list(entries[name].shape)}, the config promises "
                f"{list(shape)}: the checkpoint and its config.json do not belong together; fetch both again"
            )
    if missing := sorted(promised.keys() - entries.keys()):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise InvalidModel(
            f"{model.name}: the checkpoint lacks {', '.join(missing[:4])}{more}, which the config promises; "
            "fetch it again, or fix its index"
        )


def _shapes_outside(model: ModelConfig) -> dict[str, Shape]:
    hidden = model.count("hidden_size")
    return {"embed_tokens.weight": (model.count("vocab_size"), hidden), "norm.weight": (hidden,)}


def _shapes_inside(model: ModelConfig) -> dict[str, Shape]:
    """Of each layer. Experts are left out: checkpoints have them under several names."""
    layer, hidden = ModelShape.of(model).layers[0], model.count("hidden_size")
    rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, Shape] = {"self_attn.o_proj.weight": (hidden, rows), "post_attention_layernorm.weight": (hidden,)}
    if model.model_type == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (rows + 2 * kv_rows, hidden)
    else:
        shapes["self_attn.q_proj.weight"] = (rows, hidden)
        shapes |= {f"self_attn.{name}_proj.weight": (kv_rows, hidden) for name in ("k", "v")}
    if model.model_type != "olmo2":
        shapes["input_layernorm.weight"] = (hidden,)
    shapes |= _biases(model, "attention_bias", shapes)
    if model.model_type in _EXPERTS:
        return shapes
    inner = model.count("intermediate_size")
    mlp: dict[str, Shape] = {"mlp.down_proj.weight": (hidden, inner)}
    if model.model_type == "phi3":
        mlp["mlp.gate_up_proj.weight"] = (2 * inner, hidden)
    else:
        mlp |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return shapes | mlp | _biases(model, "mlp_bias", mlp)


def _biases(model: ModelConfig, flag: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Those of the projections among `shapes`, where the model type has this flag and it is set."""
    if not model.values.get(flag) or flag not in config_fields(model.model_type):
        return {}
    weights = {name: shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    return {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in weights.items()}
