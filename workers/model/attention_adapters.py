"""Adapters for older models, whose attention modules in transformers do not call its attention interface.

`adapt_attention` makes the modules of one model call the interface. It does not change transformers' classes, because
verification compares with them. Models whose attention adds a bias to the scores (ALiBi) are refused.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coatcheck.proto.errors import InvalidModel

# gpt_bigcode calls the interface, but holds a causal mask as a buffer.
_TYPES: Final = frozenset({"codegen", "falcon", "gpt_bigcode", "gpt_neo", "gptj"})


def needs_adapter(model_type: str) -> bool:
    """Whether `adapt_attention` changes models of this type."""
    return model_type in _TYPES


def adapt_attention(model: PreTrainedModel) -> None:
    """Make the attention modules of an older model call transformers' attention interface. Others are unchanged.

    Raises InvalidModel for a config with ALiBi.
    """
    config: Any = model.config
    if getattr(config, "alibi", False):
        raise InvalidModel(
            f"{config.model_type} cannot be served: config.json sets alibi, which adds a bias to the scores; choose a "
            "model with rotary positions"
        )
    for module in model.modules():
        _drop_causal_mask(module)
        if (adapt := _ADAPTERS.get(type(module).__name__)) is not None:
            adapt(module, config)


def _drop_causal_mask(module: nn.Module) -> None:
    """Drop the causal mask that an older module holds as a buffer. It is not in checkpoints, and the kernels do not
    read it."""
    mask = module._buffers.get("bias")
    if mask is not None and mask.dtype == torch.bool and "bias" in module._non_persistent_buffers_set:
        module._buffers["bias"] = None


def _call_interface(
    module: nn.Module,
    config: Any,
    scaling: float,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """query, key and value [1, heads, T, dim] -> [1, heads, T, dim]. `window`: the sliding window in tokens; 0 for
    none; None if `attention_mask` defines it."""
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    out, _ = attend(
        module,
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        attention_mask if window is None else None,
        scaling=scaling,
        sliding_window=window or None,
    )
    return out.transpose(1, 2), None


def _adapt_gptj(module: Any, config: Any) -> None:
    module._attn = partial(_call_interface, module, config, 1 / module.scale_attn, None)


def _adapt_gpt_neo(module: Any, config: Any) -> None:
    module.layer_idx = module.layer_id
    window = config.window_size if module.attention_type == "local" else 0
    module._attn = partial(_call_interface, module, config, 1.0, window)


def _adapt_falcon(module: Any, config: Any) -> None:
    module.forward = partial(_falcon_forward, module, config)


def _falcon_forward(
    module: Any,
    config: Any,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **unused: Any,
) -> tuple[Tensor, None]:
    """[1, T, hidden] -> [1, T, hidden]. Keys and values keep their num_kv_heads; transformers' own forward repeats them
    for every query head."""
    fused, dim = module.query_key_value(hidden_states), module.head_dim
    if module.new_decoder_architecture:
        grouped = fused.unflatten(-1, (module.num_kv_heads, -1, dim))
        parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        parts = module._split_heads(fused)
    query, key, value = (part.transpose(1, 2) for part in parts)
    rotate: Callable[..., tuple[Tensor, Tensor]] = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    out, _ = _call_interface(module, config, dim**-0.5, None, query, key, value, attention_mask)
    return module.dense(out.transpose(1, 2).flatten(2)), None


# By the class of transformers' attention module.
_ADAPTERS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "CodeGenAttention": _adapt_gptj,
    "FalconAttention": _adapt_falcon,
    "GPTJAttention": _adapt_gptj,
    "GPTNeoSelfAttention": _adapt_gpt_neo,
}
