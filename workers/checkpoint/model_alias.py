"""Model types that are served as another type. Imports no torch.

Kimi K2 is a DeepSeek V3, with the same tensors. Its config.json only names a config class in its own repository.

DeepSeek V3.2 and GLM-5 are DeepSeek V3 with an indexer, which chooses `index_topk` tokens of the context for each
query. In a context of at most `index_topk` tokens the indexer chooses every token, so attention is that of DeepSeek V3.
The two models are served up to this context, without the indexer's weights.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from coatcheck.proto.errors import InvalidModel

_SAME_AS: Final = {"deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3", "kimi_k2": "deepseek_v3"}
_INDEX_TOPK: Final = {"deepseek_v32": 2048, "glm_moe_dsa": 2048}  # if config.json has none
# Fields that the served type does not have, or that mean something else there.
_LEFT_OUT: Final = frozenset(("auto_map", "layer_types", "mlp_layer_types", "indexer_types", "head_dim"))
_INDEXER: Final = re.compile(r".+\.self_attn\.indexer\..+")


def is_alias(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")) in _SAME_AS


def resolve_alias(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json with the model_type that is served, without references to code in the checkpoint.

    For a type with an indexer, `index_topk` is the longest context at which the model is served. Raises InvalidModel
    for an `index_topk` that is not an integer of at least 1, and for dense layers after sparse ones.
    """
    if not is_alias(config):
        return dict(config)
    model_type = str(config["model_type"])
    if model_type not in _INDEX_TOPK:
        kept = {name: value for name, value in config.items() if name != "auto_map"}
        return kept | {"model_type": _SAME_AS[model_type]}
    kept = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    if kept.get("index_topk") is None:
        kept["index_topk"] = _INDEX_TOPK[model_type]
    index_topk = kept["index_topk"]
    if isinstance(index_topk, bool) or not isinstance(index_topk, int) or index_topk < 1:
        raise InvalidModel(f"config.json has index_topk {index_topk!r}; it must be a whole number of at least 1")
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if "dense" in kinds[dense:]:
            raise InvalidModel(
                f"config.json has mlp_layer_types with a dense layer behind a sparse one; {model_type} is served with "
                "its dense layers first: choose another model"
            )
        kept["first_k_dense_replace"] = dense
    return kept | {"model_type": _SAME_AS[model_type]}


def sparse_attention_note(index_topk: int) -> str:
    """A note for users of a model with sparse attention that is served with full attention."""
    return f"sparse attention is served up to {index_topk:,} tokens (index_topk), where it equals full attention"


def is_indexer_weight(config: Mapping[str, Any], key: str) -> bool:
    """Whether `key` is a tensor of an indexer, which is not loaded. `config`: as resolve_alias returns it."""
    return config.get("index_topk") is not None and _INDEXER.fullmatch(key) is not None
