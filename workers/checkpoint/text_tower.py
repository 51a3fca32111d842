"""The text model inside a multimodal checkpoint: its config, and the names of its tensors. Imports no torch.

A multimodal config.json has the config of the text model in text_config, or among its own fields. The tensors of the
text model have a prefix. A prompt of text alone does not use the other parts, so the text model is served alone. Tests
compare each type below with transformers' multimodal class on text prompts.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

# {model_type of a multimodal config.json: the type of the text model, if text_config does not name it}.
_TOWERS: Final = {
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "granite4_vision": "granite4_vision_text",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hunyuan_vl": "hunyuan_vl_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
MULTIMODAL_TYPES: Final = frozenset(_TOWERS)
# {text type without a causal model in transformers: the type that computes the same for text}. For text their three
# rotary positions (mrope) are equal.
_SAME_AS: Final = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "granite4_vision_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Fields of the other type that the text type lacks, with the values that make the other type compute the same.
_ALWAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4v_moe_text": {"use_qk_norm": False},
    "glm4v_text": {"attention_bias": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
# (pattern for the start of a tensor's name, start of its name in a text checkpoint). The first pattern that matches
# counts.
_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"((model\.)?language_model|thinker)\.lm_head\.", "lm_head."),
        (r"language_model\.model\.", "model."),
        (r"model\.(language_model|text_model)\.", "model."),
        (r"lm_head\.", "lm_head."),
        (r"(thinker\.)?model\.(?=embed_tokens\.|layers\.|norm\.)", "model."),
    )
)
_DTYPES: Final = frozenset(("dtype", "torch_dtype"))  # two names of one field
# Fields of the multimodal config that hold for its text model, whatever text_config has. transformers reads them there.
_SHARED: Final = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether `config`, the object of a config.json, is that of a multimodal checkpoint."""
    return text_config(config) is not None or str(config.get("model_type")) in _TOWERS


def text_config(config: Mapping[str, Any]) -> Any:
    """The text_config of a multimodal config.json; None if it has none.

    Qwen-Omni has a thinker, which writes text, and a talker, which speaks it. Only the thinker is served.
    """
    thinker = config.get("thinker_config")
    return (thinker if isinstance(thinker, dict) else config).get("text_config")


def text_model_type(config: Mapping[str, Any]) -> str | None:
    """The model type that computes the text model of a multimodal config.json; None if it is not served."""
    named = _named_type(config)
    return None if named is None else _SAME_AS.get(named, named)


def _named_type(config: Mapping[str, Any]) -> str | None:
    """transformers' model type of the text model; None for an unknown multimodal type."""
    if (default := _TOWERS.get(str(config.get("model_type")))) is None:
        return None
    text = text_config(config)
    named = str(text.get("model_type", default)) if isinstance(text, dict) else default
    return _TOWERS.get(named, named)  # older Qwen2-VL configs name the whole model in text_config


def text_fields(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model as a config.json of the type `text_model_type`, which must not be None.

    `config`: the multimodal config.json. `text`: the fields of its text model.
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
