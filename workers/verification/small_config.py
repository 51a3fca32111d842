"""shrink_config(): a small copy of a model's config that takes the same paths through the model's code.

Switches, layer types, activations, multipliers and kinds of scaling stay as they are. Sizes become small. Sliding
windows and original context lengths become shorter than the sequences that are compared. The first few layers are kept.
"""

import math
import re
import sys
from copy import deepcopy
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel

VOCAB_SIZE: Final = 199
MAX_POSITIONS: Final = 256
SLIDING_WINDOW: Final = 16
MAX_LAYERS: Final = 8  # holds one period of every published pattern of layer types
# If layers share keys and values: two periods, because the first layer of each kind does not share.
_MAX_LAYERS_SHARED: Final = 12
_HEAD_DIM: Final = 16
_INNER_SIZE: Final = 96
_EXPERT_SIZE: Final = 32
_LINEAR_HEADS: Final = 4
_LINEAR_DIM: Final = 32

_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_TOWER_LAYER_COUNTS: Final = (*_LAYER_COUNTS, "num_blocks")  # the last: phi4_multimodal's audio tower
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
_HEAD_DIMS: Final = ("head_dim", "global_head_dim", "kv_channels", "d_kv", "query_pre_attn_scalar")
# (pattern for a field's name, limit of the field's number). The first pattern that matches counts.
_LIMITS: Final = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r"(sliding_)?window(_size)?|sliding_window_size|local_attention(_window)?|attention_window", SLIDING_WINDOW),
        (r"max_position_embeddings|model_max_length|n_positions|n_ctx|max_sequence_length|max_seq_len", MAX_POSITIONS),
        (r"original_max_position_embeddings", 32),
        (r"floor_scale", 8),  # llama4's attention depends on position // floor_scale
        (r"linear_num_heads", _LINEAR_HEADS),
        (r"linear_head_dim", _LINEAR_DIM),
        (r"attention_chunk_size", sys.maxsize),  # chunks are served only if the context fits in one
        (r"vocab_size.*", VOCAB_SIZE),
        (r"(num|n|moe_num)_(local_|routed_)?experts", 8),
        (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_?k_experts|experts_per_token", 2),
        (r"(num|n|moe_num)_shared_experts?", 2),
        (r"(moe_)?n_group|num_expert_group", 2),
        (r"(moe_)?topk_group", 1),
        (r".*_(token|tok)_(id|index|ids)|.*_token|.*_id", 2),
    )
)
_SIZE: Final = re.compile(r".*(size|dim|rank|inner|width|channels|hidden|ffn|embd|intermediate)(_.*)?|d_ff")
# Fields that are lists of layer indices. Lists with an element for each layer are recognised by their length.
_LAYER_INDICES: Final = (
    "mlp_only_layers", "moe_layers", "dense_layers", "global_attn_layers", "attn_layer_indices", "full_attn_idxs",
    "hybrid_layer_ids",
)  # fmt: skip
# Fields that zamba2's config class computes from others, unless they are given.
_ZAMBA2_COMPUTED: Final = (
    "attention_head_dim", "attention_hidden_size", "kv_channels", "mamba_headdim", "num_query_groups",
)  # fmt: skip
# Fields that say how many of the first layers are of another kind.
_FIRST_LAYERS: Final = ("max_window_layers", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def shrink_config(config: Any) -> Any:
    """A config of the same class with a few layers. Raises InvalidModel if the class refuses the small values."""
    try:
        values = _Shrinker(config).shrink()
        values.pop("quantization_config", None)  # the copy's random weights are not quantised
        values.pop("qk_head_dim", None)  # the config class computes it from two other fields, which are shrunk
        return type(config).from_dict(values)
    except Exception as error:  # transformers' validators raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(f"{config.model_type}: no small copy of its config can be made ({reason[:300]})") from error


def keep_layers(config: Any, num_layers: int) -> Any:
    """A config with only the first layers of `config`. Raises whatever transformers raises for it."""
    old: int = config.num_hidden_layers
    values: dict[str, Any] = config.to_dict()
    values |= {name: num_layers for name in _LAYER_COUNTS if name in values}
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    values |= {name: value[:num_layers] for name, value in lists.items() if len(value) == old}
    if by_layer := values.get("per_layer_config"):
        values["per_layer_config"] = {layer: fields for layer, fields in by_layer.items() if int(layer) < num_layers}
    values |= {name: [i for i in value if i < num_layers] for name, value in lists.items() if name in _LAYER_INDICES}
    return type(config).from_dict(values)


def _count_layers(config: Any) -> int:
    """The number of first layers to keep. The last one kept has the kind of the model's last layer, because Gemma 4's
    config requires that."""
    most = _MAX_LAYERS_SHARED if getattr(config, "num_kv_shared_layers", 0) else MAX_LAYERS
    old: int = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if old <= most or not isinstance(kinds, list) or len(kinds) != old:
        return min(old, most)
    least = max(kinds.index(kind) + 1 for kind in kinds)  # nemotron_h may attend first in its 15th layer
    most = max(most, least)
    return next((count for count in range(most, least - 1, -1) if kinds[count - 1] == kinds[-1]), most)


class _Shrinker:
    """The sizes of the small config, from those of `config`."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int

    def __init__(self, config: Any) -> None:
        self.old_layers: int = config.num_hidden_layers
        self.layers = _count_layers(config)
        self.old_hidden: int = config.hidden_size
        self.old_heads: int = getattr(config, "num_attention_heads", None) or max(1, self.old_hidden // 64)  # Mamba
        self.values: dict[str, Any] = deepcopy(config.to_dict())
        self.old_kv_heads: int = next(
            (self.values[name] for name in _KV_HEADS if self.values.get(name)), self.old_heads
        )
        self.old_head_dim: int = self.values.get("head_dim") or self.old_hidden // self.old_heads
        ratio = max(1, self.old_heads // self.old_kv_heads)
        self.kv_heads = min(self.old_kv_heads, 4 if ratio == 1 else 2)
        self.heads = self.kv_heads * min(ratio, 4)
        # In some models num_attention_heads * head_dim is not the hidden size. Then it is not in the copy either.
        is_whole = self.old_head_dim * self.old_heads == self.old_hidden
        self.hidden = self.heads * (_HEAD_DIM if is_whole else _HEAD_DIM * 3 // 2)

    def shrink(self) -> dict[str, Any]:
        """The small config's fields."""
        values = self._fields(self.values)
        if values.get("mamba_n_heads") and values.get("mamba_d_ssm") is None:
            # mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size.
            inner, head_dim = values["mamba_expand"] * self.hidden, _HEAD_DIM // 2
            groups = math.gcd(values.get("mamba_n_groups") or 1, inner // head_dim)
            values |= dict(mamba_n_heads=inner // head_dim, mamba_d_head=head_dim, mamba_n_groups=groups)
        if values["model_type"] == "mamba2":  # num_heads * head_dim must be expand * hidden_size
            heads = values["expand"] * self.hidden // _HEAD_DIM
            values |= dict(num_heads=heads, head_dim=_HEAD_DIM, n_groups=math.gcd(values["n_groups"], heads))
        if values["model_type"] == "zamba2":  # n_mamba_heads must divide mamba_expand * hidden_size
            heads = values["mamba_expand"] * self.hidden // _HEAD_DIM
            values |= dict(n_mamba_heads=heads, mamba_ngroups=math.gcd(values["mamba_ngroups"], heads))
            for name in _ZAMBA2_COMPUTED:
                values.pop(name, None)
        return values

    def _fields(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self._field(name, value) for name, value in values.items()}

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or value is None or isinstance(value, float | str):
            return value
        if isinstance(value, dict):
            if name in ("rope_parameters", "rope_scaling"):
                return self._rope(value)
            if name == "per_layer_config":
                return {layer: self._fields(fields) for layer, fields in value.items() if int(layer) < self.layers}
            if name == "linear_attn_config":  # kimi_linear's, whose fields have the names of other fields
                return value | dict(num_heads=_LINEAR_HEADS, head_dim=_LINEAR_DIM)
            # The config of a part that is not computed for text, such as a vision tower.
            return {inner: 1 if inner in _TOWER_LAYER_COUNTS else number for inner, number in value.items()}
        if isinstance(value, list | tuple):
            return self._list(name, list(value))
        return self._count(name, value) if isinstance(value, int) else value

    def _list(self, name: str, values: list[Any]) -> list[Any]:
        if name in _LAYER_INDICES:
            return [index for index in values if isinstance(index, int) and index < self.layers]
        if len(values) == self.old_layers:
            values = values[: self.layers]
        return [self._field(name, value) for value in values]

    def _count(self, name: str, value: int) -> int:
        """The small value of an int field."""
        if name in _LAYER_COUNTS:
            return self.layers
        if name in _FIRST_LAYERS:
            return self.layers if value >= self.old_layers else min(value, self.layers // 2)
        if name == "num_kv_shared_layers":
            return min(value, self.layers // 4)
        if name in _HEADS:
            return self.heads
        if name in _KV_HEADS:
            return self.kv_heads
        limit = next((limit for pattern, limit in _LIMITS if pattern.fullmatch(name)), None)
        if limit is not None:
            return min(value, limit)
        return self._size(name, value) if _SIZE.fullmatch(name) else value

    def _size(self, name: str, value: int) -> int:
        if name in _HEAD_DIMS:
            if value == self.old_hidden // self.old_heads and name == "query_pre_attn_scalar":
                return self.hidden // self.heads
            return max(2, _HEAD_DIM * value // self.old_head_dim // 2 * 2)
        if name in _HIDDEN or value == self.old_hidden:
            return self.hidden
        if value == self.old_head_dim:
            return _HEAD_DIM
        if name == "v_head_dim" and "kv_lora_rank" not in self.values and value < self.old_head_dim:
            return max(2, _HEAD_DIM * value // self.old_head_dim // 2 * 2)
        if "rank" in name or "per_layer" in name:
            return min(value, 8)
        if "rotary" in name or "rope" in name:
            return max(2, _HEAD_DIM * value // self.old_head_dim // 2 * 2)
        if "expert" in name or "moe" in name:
            return min(value, _EXPERT_SIZE)
        return min(value, _INNER_SIZE)

    def _rope(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """RoPE parameters of all layers, or by layer type. Longrope has a list with a factor for each pair of elements;
        the list is shortened."""
        small: dict[str, Any] = {}
        for name, value in parameters.items():
            if isinstance(value, dict):
                small[name] = self._rope(value)
            elif name.endswith("_factor") and isinstance(value, list):
                small[name] = value[: max(1, len(value) * _HEAD_DIM // self.old_head_dim)]
            else:
                small[name] = self._field(name, value)
        return small
