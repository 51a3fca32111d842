"""Fa3Backend: attention by FlashAttention-3 (`flash_attn_with_kvcache` of FlashAttention's folder hopper/).

The library reads the pool in place. Its pages are [num_blocks, block_size, kv_heads, head_dim] with any strides, as
long as head_dim is contiguous: a transposed view of the pool's [num_blocks, kv_heads, block_size, head_dim]. Its page
table is the block table. The library plans on the device: which program computes what, and into how many splits a
sequence is divided. A step needs only two integers from the host, so every shape of step can be a CUDA graph.

No GPU has run this file. tests/workers/attention/test_attention_backends.py binds its calls to the library's signature,
and compares them with the float32 reference through a function that reads the documented layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.workers.attention.attention import kind_of
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, AttentionPlans, LibraryPlan
from coatcheck.workers.core.model_spec import LayerSpec

# Partial results are float32 [splits, heads, tokens, head_dim], and a log-sum-exp of each head. The library's own limit
# of 128 splits would take 512 MiB for 256 decodes with 32 heads of 128. 32 splits are vLLM's limit in CUDA graphs.
_MAX_SPLITS = 32
_SPLIT_BYTES = 128 << 20


def choose_num_splits(num_tokens: int, num_heads: int, head_dim: int) -> int:
    """The most splits of a sequence's keys. The library uses fewer if the sequences alone keep the GPU busy."""
    return max(1, min(_MAX_SPLITS, _SPLIT_BYTES // (4 * num_tokens * num_heads * head_dim)))


@dataclass(frozen=True, slots=True)
class Fa3Plan(LibraryPlan):
    """`function`: flash_attn_with_kvcache. `max_query_len`: an upper bound of the queries of a sequence."""

    function: Callable[..., Tensor]
    max_query_len: int

    def attend(
        self,
        q: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
    ) -> Tensor:
        return self.function(
            q,
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_tables,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=self.max_query_len,
            softmax_scale=scale,
            causal=True,
            # The library's window does not count the query's own key.
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softcap=softcap,
            num_splits=choose_num_splits(*q.shape),
        )


class Fa3Backend:
    """`layers`: with this rank's heads. The constructor imports the library."""

    warm_up_lengths: Sequence[int] = (2,)  # the library is compiled ahead of time
    short_queries = (1, 1)
    captures_chunks = True

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._kinds = {kind_of(layer) for layer in layers}
        # The largest steps of the warm-up have many tokens, and so few splits or none.
        self.unmeasured_bytes = _SPLIT_BYTES + max(_SPLIT_BYTES // kind.head_dim for kind in self._kinds)
        self._function: Callable[..., Tensor] = import_module("flash_attn_interface").flash_attn_with_kvcache

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionPlans:
        plan = Fa3Plan(self._function, max(q_lens))
        return dict.fromkeys(self._kinds, plan)

    def num_ints(self, shape: StepShape) -> int:
        return 0

    def pack(self, shape: StepShape, q_lens: Sequence[int], seq_lens: Sequence[int]) -> NDArray[np.int32]:
        return np.empty(0, np.int32)

    def view(self, shape: StepShape, packed: Tensor) -> AttentionPlans:
        plan = Fa3Plan(self._function, shape.num_tokens if shape.has_wide else 1)
        return dict.fromkeys(self._kinds, plan)
