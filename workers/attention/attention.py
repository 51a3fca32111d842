"""Attention as transformers calls it, over the paged KV pool.

transformers' models look their attention function up by name in AttentionInterface. `attend` is registered there under
NAME. It stores the new keys and values in the pool and reads the context through block tables. NAME is absent from
transformers' mask interface, so no mask is built: the kernel applies causality, windows and sequence boundaries.
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
from coatcheck.workers.core.model_spec import LayerSpec

NAME = "coatcheck"

KVPools = list[KVCache]  # by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(LayerSpec):
    """The attention parameters of one layer, found by attention_probe.py. `module`: the attention module's name."""

    module: str
    scale: float
    has_sinks: bool = False


def register_attention() -> None:
    """Register `attend` with transformers; idempotent."""
    AttentionInterface.register(NAME, attend)


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
    **ignored: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, dim].

    `sliding_windows`: by layer, 0 for full attention, from the probe. They replace the `sliding_window` argument,
    because some models write their window only into the mask. `s_aux`: attention sinks, [heads].
    """
    layer = layer_index(module)
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
        scale=softmax_scale(scaling, query),
        sliding_window=sliding_windows[layer],
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        batch_invariant=attention_metadata.batch_invariant,
        total_seq_len=attention_metadata.total_seq_len,
        num_prefills=attention_metadata.num_prefills,
    )
    return out.unsqueeze(0), None


def layer_index(module: nn.Module) -> int:
    """The layer index of an attention module. Raises ValueError if it has none."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError("its attention modules have no layer_idx")
    return layer


def softmax_scale(scaling: float | None, query: Tensor) -> float:
    """The factor of the attention scores; 1 / sqrt(head_dim) if `scaling` is None."""
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
