"""ModelShape: what each attention layer stores for a token, from config.json alone.

The LayerSpecs equal those of a loaded model before it is divided over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from coatcheck.cluster.planner.hybrid_layers import HybridLayers
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.held_weights import SHARED_LAYERS
from coatcheck.workers.checkpoint.model_alias import sparse_attention_note
from coatcheck.workers.core.model_spec import LayerSpec, StateSpec

_DTYPES: Final = ("float32", "bfloat16", "float16")
# Fields of families whose layers keep other state than keys and values.
_OTHER_STATE: Final = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "cross_attention_layers",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
# Families whose full attention has wider heads than attention with a window.
_WIDE_HEADS: Final = frozenset({"gemma4_text", "gemma4_unified_text"})
# Every n-th layer has full attention, for families whose config.json may lack layer_types.
_PATTERNS: Final = {
    "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6, "gemma4_unified_text": 6,
    "cohere2": 4,
}  # fmt: skip
# Families whose decoder layers hold several attentions.
ATTENTIONS_PER_LAYER: Final = {"longcat_flash": 2}
# Families with more KV heads in layers with a sliding window, and how many times as many.
_MORE_KV_HEADS: Final = {"mimo_v2_flash": 2}
# Families whose values are shorter than their keys. The pool pads such a value with zeros to the length of a key.
_SHORT_VALUES: Final = frozenset({"mimo_v2_flash"})
NO_ATTENTION: Final = LayerSpec(0, 0, 0)  # stands for a layer of a model that has none with attention


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`layers`: as the KV pool stores them, latents for latent attention. `expanded`: keys and values of every head.

    `states`: the layers that keep a state for each sequence instead; they are in neither of the others.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    expanded: tuple[LayerSpec, ...]
    dtype: str
    max_model_len: int | None
    notes: tuple[str, ...]
    states: tuple[StateSpec, ...] = ()
    names_dtype: bool = True  # False: config.json has no dtype, and `dtype` is a guess

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """Raise InvalidModel if fields are missing, or if layers keep other state than keys and values."""
        hybrid = HybridLayers.of(config)
        if hybrid is None:
            _refuse_other_state(config)
        notes = []
        if config.is_multimodal:
            notes.append(
                "only the text part is counted and served"
                if config.is_served
                else "only the text part is counted; `coatcheck serve` does not serve this model"
            )
        windows = _windows_by_layer(config, hybrid)
        layer, expanded = _attention_layer(config) if windows else (NO_ATTENTION, NO_ATTENTION)
        shapes = _shapes_by_layer(config, windows)
        for own, source in zip(shapes, _kv_sources(config, windows), strict=True):
            own["kv_source"] = source
        dtype = str(config.values.get("dtype") or config.values.get("torch_dtype") or "")
        names_dtype = dtype in _DTYPES
        if not names_dtype:
            notes.append(f"config.json names {f'dtype {dtype}' if dtype else 'no dtype'}; counted as bfloat16")
            dtype = "bfloat16"
        if config.values.get("quantization_config") is not None:
            notes.append(f"quantised weights: counted as ranks hold them if MODEL has its files, else as {dtype}")
        longest = config.number("max_position_embeddings", "model_max_length", "n_positions", "n_ctx", default=0)
        if index_topk := config.number("index_topk", default=0) if config.model_type == "deepseek_v3" else 0:
            notes.append(sparse_attention_note(index_topk))
            longest = min(longest or index_topk, index_topk)
        return cls(
            name=config.name,
            layers=tuple(
                replace(_with_window(config, layer, w), **own) for w, own in zip(windows, shapes, strict=True)
            ),
            expanded=tuple(
                replace(_with_window(config, expanded, w), **own) for w, own in zip(windows, shapes, strict=True)
            ),
            dtype=dtype,
            max_model_len=longest or None,
            notes=tuple(notes),
            states=() if hybrid is None else hybrid.states,
            names_dtype=names_dtype,
        )

    @property
    def is_latent(self) -> bool:
        return self.layers != self.expanded

    def with_kv_heads(self, num_kv_heads: int) -> tuple[LayerSpec, ...]:
        """`expanded` with another number of KV heads per layer."""
        return tuple(replace(layer, num_kv_heads=num_kv_heads) for layer in self.expanded)


def _windows_by_layer(config: ModelConfig, hybrid: HybridLayers | None) -> list[int]:
    """The sliding window of each attention layer in tokens; 0: full attention. Raise InvalidModel if there is no such
    layer, and none with a state."""
    if hybrid is None:
        count = config.count("num_hidden_layers", "n_layer", "num_layers", most=10_000)
        windows = _sliding_windows(config, count * ATTENTIONS_PER_LAYER.get(config.model_type, 1))
    else:
        window = config.number("sliding_window", default=256 if config.model_type == "lfm3" else 0)
        with_window = {"full_attention"} if config.model_type == "minimax" else {"sliding_attention"}
        windows = [window if hybrid.kinds[layer] in with_window else 0 for layer in hybrid.attention_layers]
    if not windows and (hybrid is None or not hybrid.states):
        raise InvalidModel(f"{config.name}: config.json has no layer with attention; correct its layer_types")
    return windows


def _attention_layer(config: ModelConfig) -> tuple[LayerSpec, LayerSpec]:
    """An attention layer without a window: as the KV pool stores it, and with the keys and values of every head."""
    heads = config.count("num_attention_heads", "n_head", "num_heads")
    if config.values.get("kv_lora_rank") is not None:
        nope, rope, v = (config.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latent = LayerSpec(heads, 1, config.count("kv_lora_rank") + rope, v_head_dim=0, rope_head_dim=rope)
        return latent, LayerSpec(heads, heads, nope + rope, v_head_dim=v)
    layer = LayerSpec(heads, _kv_heads(config, heads), _head_dim(config, heads))
    if config.model_type in _SHORT_VALUES and (v := config.count("v_head_dim", default=128)) < layer.head_dim:
        layer = replace(layer, unpadded_v_dim=v)
    return layer, layer


def _with_window(config: ModelConfig, layer: LayerSpec, window: int) -> LayerSpec:
    factor = _MORE_KV_HEADS.get(config.model_type, 1) if window else 1
    return replace(layer, sliding_window=window, num_kv_heads=factor * layer.num_kv_heads)


def _kv_heads(config: ModelConfig, heads: int) -> int:
    # Old falcon models: multi_query means one KV head. New ones give the number and may still set multi_query.
    if config.values.get("multi_query") and not config.values.get("new_decoder_architecture"):
        return 1
    kv_heads = config.count("num_key_value_heads", "num_kv_heads", default=heads)
    if heads % kv_heads:
        raise InvalidModel(
            f"{config.name}: config.json has {kv_heads} num_key_value_heads for {heads} attention heads; "
            "the KV heads must divide the attention heads"
        )
    return kv_heads


def _head_dim(config: ModelConfig, heads: int) -> int:
    if config.values.get("head_dim") is not None or config.model_type in ("lfm3", "nemotron_h"):
        return config.count("head_dim", default=128)
    hidden = config.count("hidden_size", "n_embd", "d_model")
    if config.model_type == "zamba2":  # its attention reads two rows of that size side by side
        hidden *= 2
    if hidden % heads:
        raise InvalidModel(
            f"{config.name}: config.json has no head_dim, and {heads} heads do not divide hidden_size {hidden}; add it"
        )
    return hidden // heads


def _given_counts(config: ModelConfig, names: dict[str, str]) -> dict[str, Any]:
    return {ours: config.count(name) for ours, name in names.items() if config.values.get(name) is not None}


def _shapes_by_layer(config: ModelConfig, windows: Sequence[int]) -> list[dict[str, Any]]:
    """For each layer, the fields of LayerSpec in which it differs from the others.

    Gemma 4's layers with full attention have fewer KV heads, and wider heads. Newer config.json files give these fields
    for each layer, older ones for the kind of layer.
    """
    values, num_layers = config.values, len(windows)
    by_layer = values.get("per_layer_config")
    wide = _given_counts(config, dict(head_dim="global_head_dim"))
    if config.model_type in _WIDE_HEADS and not isinstance(by_layer, dict):
        wide = dict(head_dim=512) | wide
    if values.get("attention_k_eq_v"):
        wide |= _given_counts(config, dict(num_kv_heads="num_global_key_value_heads"))
    shapes: list[dict[str, Any]] = [{} if window else dict(wide) for window in windows]
    for index, own in by_layer.items() if isinstance(by_layer, dict) else ():
        if str(index).isdecimal() and int(index) < num_layers and isinstance(own, dict):
            one = ModelConfig(config.name, own)
            shapes[int(index)] = _given_counts(one, dict(head_dim="head_dim", num_kv_heads="num_key_value_heads"))
    return shapes


def _kv_sources(config: ModelConfig, windows: Sequence[int]) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads; None: the layer stores its own.

    In Gemma 3n and 4 each of the last num_kv_shared_layers layers reads the keys and values of the last layer of the
    same kind (sliding or full attention) that stores its own.
    """
    shared = config.number("num_kv_shared_layers", default=SHARED_LAYERS.get(config.model_type, 0))
    if not shared:
        return [None] * len(windows)
    storing = windows[: max(0, len(windows) - shared)]
    last = {window: index for index, window in enumerate(storing)}
    if not set(windows) <= last.keys():
        raise InvalidModel(
            f"{config.name}: config.json has num_kv_shared_layers {shared} of {len(windows)} layers, and some of these "
            "have no earlier layer of their kind in layer_types; correct the two, or fetch config.json again"
        )
    return [None] * len(storing) + [last[window] for window in windows[len(storing) :]]


def _sliding_windows(config: ModelConfig, num_layers: int) -> list[int]:
    """Sliding window of each layer in tokens; 0: full attention."""
    values = config.values
    window = config.number("sliding_window", default=0)
    kinds = values.get("layer_types")
    if config.model_type == "mimo_v2_flash":
        window = config.number("sliding_window_size", default=window - 1) + 1  # the tokens before the query
        if kinds is None:
            is_full = [index == 0 or (index + 1) % 6 == 0 for index in range(num_layers)]
            kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
    if isinstance(kinds, list):
        if len(kinds) != num_layers:
            raise InvalidModel(f"{config.name}: config.json has {len(kinds)} layer_types for {num_layers} layers")
        if "chunked_attention" in kinds:
            window = config.count("attention_chunk_size")
        return [0 if kind == "full_attention" else window for kind in kinds]
    if not window or values.get("use_sliding_window") is False:
        return [0] * num_layers
    if "max_window_layers" in values:  # qwen: these first layers have full attention
        return [0 if i < config.number("max_window_layers") else window for i in range(num_layers)]
    pattern = values.get("sliding_window_pattern", _PATTERNS.get(config.model_type))
    if isinstance(pattern, str):  # exaone4: LLLG
        pattern = len(pattern)
    if isinstance(pattern, int) and pattern > 0:
        return [window if (i + 1) % pattern else 0 for i in range(num_layers)]
    return [window] * num_layers


def _refuse_other_state(config: ModelConfig) -> None:
    """Raise InvalidModel if a layer keeps other state than keys and values for each token, or is of an unknown type."""
    if config.values.get("is_encoder_decoder"):
        raise InvalidModel(f"{config.name} is an encoder-decoder; only decoder-only models are served")
    attentions = config.values.get("attn_type_list")
    are_all_full = isinstance(attentions, list) and all(one == 1 for one in attentions)  # as in MiniMax-M2
    other = [name for name in _OTHER_STATE if not (name == "attn_type_list" and are_all_full)]
    if field := next((name for name in other if config.values.get(name)), None):
        raise InvalidModel(
            f"{config.name}: config.json has {field}, so some layers keep state outside of the KV cache; "
            "such models are not served: choose one with attention in every layer"
        )
    kinds = config.values.get("layer_types")
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    unknown = sorted({str(kind) for kind in kinds} - known) if isinstance(kinds, list) else []
    if unknown:
        raise InvalidModel(
            f"{config.name}: config.json has layer_types {', '.join(unknown)}; layers of these types are not served"
        )
