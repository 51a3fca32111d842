"""Attention as transformers calls it: keys and values go to the paged pool, queries read it through block tables.

`attend` is registered with transformers' AttentionInterface under NAME. The name is absent from its mask interface,
so that no mask is built: causality, windows and sequence boundaries are the kernel's. `probe_attention` runs a model
once on the meta device and reports what each layer asks for, or why it cannot be served. Neither knows which request
a token belongs to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..kernels.kv_cache import KVCache
from ..kernels.paged_attention import paged_attention
from ..kernels.store_kv import store_kv
from ..proto.errors import InvalidModel
from .attention_metadata import AttentionMetadata
from .meta_pass import meta_pass

NAME = "coatcheck"
_PROBE = "coatcheck_probe"

KVPools = list[KVCache]

# What models hand to their attention function and that changes nothing of what it computes here.
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention, all ranks' heads together. `module` is its name in the model."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    softcap: float
    has_sinks: bool


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attention_metadata: AttentionMetadata,
    kv_pools: KVPools,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **harmless: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim]."""
    cache = kv_pools[_layer_of(module)]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    store_kv(k, v, cache, attention_metadata.slot_mapping)
    out = paged_attention(
        q,
        cache,
        block_tables=attention_metadata.block_tables,
        seq_lens=attention_metadata.seq_lens,
        cu_seqlens_q=attention_metadata.cu_seqlens_q,
        max_seqlen_q=attention_metadata.max_seqlen_q,
        scale=_scale(scaling, query),
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        one_order=attention_metadata.one_order,
        total_seq_len=attention_metadata.total_seq_len,
        num_prefills=attention_metadata.num_prefills,
    )
    return out.unsqueeze(0), None


def probe_attention(model: PreTrainedModel) -> list[AttentionCall]:
    """What each layer asks for, in layer order, from one pass of a model built on the meta device.

    Raises InvalidModel where a layer's attention does not come to us, or asks for something that we lack.
    """
    calls: dict[int, AttentionCall] = {}
    names = {module: name for name, module in model.named_modules()}
    config = model.config
    experts = getattr(config, "_experts_implementation", None)
    config._attn_implementation = _PROBE
    config._experts_implementation = "batched_mm"  # the only form that runs on the meta device
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with meta_pass(model):
            model.base_model(input_ids=ids, position_ids=ids, use_cache=False, probed=(names, calls))
    except _Refused as refused:
        raise InvalidModel(f"{model.config.model_type} cannot be served: {refused}") from None
    except Exception as error:  # whatever a foreign model's code raises when called so is the reason
        raise InvalidModel(
            f"{model.config.model_type} cannot be served: it does not take flattened tokens without a cache ({error})"
        ) from error
    finally:
        config._attn_implementation = NAME
        config._experts_implementation = experts
    expected = config.get_text_config().num_hidden_layers
    missing = [str(layer) for layer in range(expected) if layer not in calls]
    if missing:
        raise InvalidModel(
            f"{model.config.model_type} cannot be served: layers {', '.join(missing)} keep their state "
            "outside of transformers' attention interface"
        )
    return [calls[layer] for layer in range(expected)]


class _Refused(Exception):
    """Carries the reason out of the model's forward pass."""


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probed: tuple[dict[nn.Module, str], dict[int, AttentionCall]] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if probed is None:
        raise _Refused("its layers do not hand our arguments down to attention")
    strange = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if strange:
        raise _Refused(f"its attention takes {', '.join(strange)}, which our kernels do not")
    if attention_mask is not None:
        raise _Refused("its attention adds a bias of its own to the scores")
    if not getattr(module, "is_causal", True):
        raise _Refused("its attention is not causal")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise _Refused(f"its keys and values differ in shape ({list(key.shape)}, {list(value.shape)})")
    names, calls = probed
    layer = _layer_of(module)
    if layer in calls:
        raise _Refused(f"layer {layer} attends more than once")
    calls[layer] = AttentionCall(
        module=names[module],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=_scale(scaling, query),
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        has_sinks=s_aux is not None,
    )
    return query.transpose(1, 2), None


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _Refused("its attention modules do not say which layer they are")
    return layer


def _scale(scaling: float | None, query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def register() -> None:
    """Makes NAME known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(_PROBE, _record)
