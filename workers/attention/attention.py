"""Attention as transformers calls it: keys and values go to the paged pool, queries read it through block tables.

`attend` is registered with transformers' AttentionInterface under NAME. The name is absent from its mask interface, so
that no mask is built: the kernel applies causality, windows and sequence boundaries. Each layer's window is the one
that attention_probe.py found, because some models write it only into the mask. This module does not know which request
a token belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.store_kv import store_kv
from coatcheck.workers.attention.attention_metadata import AttentionMetadata

NAME = "coatcheck"

KVPools = list[KVCache]


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
    sliding_windows: Sequence[int],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **harmless: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim].

    `sliding_windows`: of all layers, 0 for full attention. They replace the `sliding_window` that a layer may pass.
    """
    layer = layer_of(module)
    cache = kv_pools[layer]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    store_kv(k, v, cache, attention_metadata.slot_mapping)
    out = paged_attention(
        q,
        cache,
        block_tables=attention_metadata.block_tables,
        seq_lens=attention_metadata.seq_lens,
        cu_seqlens_q=attention_metadata.cu_seqlens_q,
        max_seqlen_q=attention_metadata.max_seqlen_q,
        scale=scale_of(scaling, query),
        sliding_window=sliding_windows[layer],
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        one_order=attention_metadata.one_order,
        total_seq_len=attention_metadata.total_seq_len,
        num_prefills=attention_metadata.num_prefills,
    )
    return out.unsqueeze(0), None


def layer_of(module: nn.Module) -> int:
    """The layer index of an attention module; raises ValueError if it has none."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError("its attention modules do not say which layer they are")
    return layer


def scale_of(scaling: float | None, query: Tensor) -> float:
    """The factor of the attention scores; 1 / sqrt(head_dim) if `scaling` is None."""
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def register() -> None:
    """Makes NAME known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attend)
