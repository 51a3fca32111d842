"""The text model inside a multimodal checkpoint: its config, and the names of its tensors. Imports no torch.

A multimodal config.json has the text model's config under text_config, or beside the vision tower's, and the tensors of
the text model have a prefix. Prompts of text alone do not pass the other parts, so the text model is served by itself.
Tests compare each type below with transformers' multimodal class on text prompts.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

# model_type of a multimodal config.json -> the text model's type, if text_config does not name it.
_TOWERS: Final = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
MULTIMODAL_TYPES: Final = frozenset(_TOWERS)
# Text types that transformers has no causal model of -> the type that computes the same for text. Their three rotary
# positions (mrope) are equal for text.
_SAME_AS: Final = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# The other type has these fields and these values, which its counterpart has no fields for.
_ALWAYS: Final[Mapping[str, Mapping[str, Any]]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
# Names of the text model's tensors, and the names that they have in a text checkpoint; the first pattern that matches.
_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(model\.)?language_model\.lm_head\.", "lm_head."),
        (r"language_model\.model\.", "model."),
        (r"model\.(language_model|text_model)\.", "model."),
        (r"lm_head\.", "lm_head."),
        (r"model\.(?=embed_tokens\.|layers\.|norm\.)", "model."),
    )
)
_DTYPES: Final = frozenset(("dtype", "torch_dtype"))  # two names of one field
# Fields of the whole config that hold for its text model, whatever its text_config has: transformers reads these there.
_SHARED: Final = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, as an object, is that of a multimodal checkpoint."""
    return config.get("text_config") is not None or str(config.get("model_type")) in _TOWERS


def text_model_type(config: Mapping[str, Any]) -> str | None:
    """The type that computes the text model of a multimodal config.json; None if that is not served."""
    named = _named_type(config)
    return None if named is None else _SAME_AS.get(named, named)


def _named_type(config: Mapping[str, Any]) -> str | None:
    """transformers' type of the text model."""
    if (default := _TOWERS.get(str(config.get("model_type")))) is None:
        return None
    text = config.get("text_config")
    named = str(text.get("model_type", default)) if isinstance(text, dict) else default
    return _TOWERS.get(named, named)  # older Qwen2-VL configs name the whole model in text_config


def text_fields(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model as a config.json of its own type.

    `config`: the multimodal config.json. `text`: the fields of its text model. Only for types with a text_model_type.
    """
    named = _named_type(config)
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    fields = {name: value for name, value in text.items() if not (name in _DTYPES and shared.keys() & _DTYPES)} | shared
    if named in _SAME_AS:
        fields |= _ALWAYS.get(named, {})
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(parameters := fields.get(name), dict):
                fields[name] = _without_mrope(parameters)
    return fields | {"model_type": text_model_type(config)}


def _without_mrope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in parameters.items() if not name.startswith("mrope")}
    return {name: "default" if value == "mrope" else value for name, value in kept.items()}


def text_tensor_name(name: str) -> str | None:
    """The name that a tensor of a multimodal checkpoint has in a text checkpoint; None for the other parts' tensors."""
    for pattern, prefix in _NAMES:
        if found := pattern.match(name):
            return prefix + name[found.end() :]
    return None
