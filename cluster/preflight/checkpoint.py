"""check_checkpoint: the files of a local model that ranks and routers read, checked before Ray starts.

Only the headers of weights are read, by the code that ranks use. This module does not import torch or Ray. A rank
checks again when it loads the weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.proto.errors import InvalidModel
from coatcheck.proto.model_folder import find_adapter
from coatcheck.workers.checkpoint.quantised_layouts import plain_entries, read_quantised
from coatcheck.workers.checkpoint.safetensors_headers import TensorEntry, read_entries, stored_dtype
from coatcheck.workers.checkpoint.text_tower import text_tensor_name
from coatcheck.workers.model.known_architectures import CONFIG_FIELDS, TESTED_MODEL_TYPES

Shape = tuple[int, ...]

# Files from which transformers makes a tokenizer if there is no tokenizer.json.
_OTHER_TOKENIZERS: Final = ("*.model", "vocab.*", "*.tiktoken", "tekken.json", "merges.txt")
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_IN_LAYER: Final = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
# Model types whose layers have experts. Checkpoints store experts under several names, so their shapes are not checked.
_MIXTURES: Final = ("mixtral", "qwen3_moe")


def check_checkpoint(config: ServeConfig) -> None:
    """Raise InvalidModel for weights or a tokenizer that are missing, unreadable, or do not fit config.json.

    Skipped for a model id. Skipped if `serve` joins a Ray cluster: its nodes may have files that this host lacks.
    """
    directory = Path(config.model_source)
    if config.ray_address is not None or not directory.is_dir():
        return
    model = ModelConfig.open(config.model_source)
    weights = {file.name for file in directory.glob("*.safetensors")}
    if weights == {_ADAPTER_WEIGHTS} and (advice := find_adapter(directory)) is not None:
        raise InvalidModel(f"{directory} has no weights of a model; {advice}")
    stored = read_entries(directory)
    entries = plain_entries(stored, read_quantised(directory.name, model.values, stored))
    if model.is_multimodal:
        entries = {name: entry for key, entry in entries.items() if (name := text_tensor_name(key)) is not None}
        if not entries:
            raise InvalidModel(f"{directory.name}: no tensor has a name of a text model; fetch the checkpoint again")
    name, entry = next(iter(entries.items()))
    stored_dtype(directory.name, name, entry)
    check_tensors(fill_defaults(model), entries)
    _check_tokenizer(directory)


def _check_tokenizer(directory: Path) -> None:
    if (directory / "tokenizer.json").exists():
        # Imported late: a broken checkpoint is refused sooner.
        from coatcheck.router.text.tokenizer import TokenizerJson

        TokenizerJson.load(str(directory))
    elif not any(file for pattern in _OTHER_TOKENIZERS for file in directory.glob(pattern)):
        raise InvalidModel(
            f"{directory} has no tokenizer (no tokenizer.json, and no files that transformers can convert); "
            "copy the model's tokenizer files there"
        )
    else:
        from coatcheck.router.text.tokenizer import check_sentencepiece

        check_sentencepiece(directory)


def check_tensors(model: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """Raise InvalidModel for a tensor that is missing, or whose shape contradicts config.json.

    Checks embeddings, heads, projections and norms of tested model types. `model` comes from fill_defaults.
    """
    if model.model_type not in TESTED_MODEL_TYPES:
        return
    layers = ModelShape.of(model).layers
    in_layer, outside = _layer_shapes(model), _other_shapes(model)
    prefixes = {found[1] for name in entries if (found := _IN_LAYER.fullmatch(name)) and found[3] in in_layer}
    if len(prefixes) != 1:  # unknown tensor names
        return
    (prefix,) = prefixes
    base = prefix.removesuffix("layers")
    promised = {f"{prefix}.{layer}.{name}": shape for layer in range(len(layers)) for name, shape in in_layer.items()}
    promised |= {f"{base}{name}": shape for name, shape in outside.items()}
    if not model.values.get("tie_word_embeddings"):
        promised["lm_head.weight"] = outside["embed_tokens.weight"]
    elif "lm_head.weight" in entries and f"{base}embed_tokens.weight" not in entries:  # one of the two is enough
        promised["lm_head.weight"] = promised.pop(f"{base}embed_tokens.weight")
    for name, shape in promised.items():
        if name in entries and entries[name].shape != shape:
            raise InvalidModel(
                f"{model.name}: tensor {name} has shape {list(entries[name].shape)}, by config.json it must be "
                f"{list(shape)}: the checkpoint and its config.json do not belong together; fetch both again"
            )
    if missing := sorted(promised.keys() - entries.keys()):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise InvalidModel(
            f"{model.name}: the checkpoint lacks {', '.join(missing[:4])}{more}, which a model with this config.json "
            "has; fetch it again, or fix its index"
        )


def _other_shapes(model: ModelConfig) -> dict[str, Shape]:
    hidden = model.count("hidden_size")
    return {"embed_tokens.weight": (model.count("vocab_size"), hidden), "norm.weight": (hidden,)}


def _layer_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name within a layer -> shape."""
    layer, hidden = ModelShape.of(model).layers[0], model.count("hidden_size")
    rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, Shape] = {"self_attn.o_proj.weight": (hidden, rows), "post_attention_layernorm.weight": (hidden,)}
    if layer.is_latent:
        return _latent_shapes(model, layer.num_heads, hidden)
    if model.model_type == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (rows + 2 * kv_rows, hidden)
    else:
        shapes["self_attn.q_proj.weight"] = (rows, hidden)
        shapes |= {f"self_attn.{name}_proj.weight": (kv_rows, hidden) for name in ("k", "v")}
    if model.model_type != "olmo2":
        shapes["input_layernorm.weight"] = (hidden,)
    shapes |= _biases(model, "attention_bias", shapes)
    if model.model_type in _MIXTURES:
        return shapes
    inner = model.count("intermediate_size")
    mlp: dict[str, Shape] = {"mlp.down_proj.weight": (hidden, inner)}
    if model.model_type == "phi3":
        mlp["mlp.gate_up_proj.weight"] = (2 * inner, hidden)
    else:
        mlp |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    return shapes | mlp | _biases(model, "mlp_bias", mlp)


def _latent_shapes(model: ModelConfig, heads: int, hidden: int) -> dict[str, Shape]:
    """Norms and attention of a layer with latent attention; its MLP may be dense or sparse."""
    rank, q_rank = model.count("kv_lora_rank"), model.number("q_lora_rank", default=0)
    nope, rope, value = (model.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_shapes: dict[str, Shape] = {"self_attn.q_proj.weight": (heads * (nope + rope), hidden)}
    if q_rank:
        q_shapes = {
            "self_attn.q_a_proj.weight": (q_rank, hidden),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        }
    return q_shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _biases(model: ModelConfig, flag: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of the biases of the projections in `shapes`, if config.json sets `flag`."""
    if not model.values.get(flag) or flag not in CONFIG_FIELDS[model.model_type]:
        return {}
    weights = {name: shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    return {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in weights.items()}
