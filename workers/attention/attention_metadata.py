"""AttentionMetadata and LogitsIndices: where the tokens of one step are in the paged KV pool, and which need logits.

The runner builds both once per step, with tensors on the rank's device.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from coatcheck.kernels.attention.paged_tiles import AttentionPlan
from coatcheck.kernels.kv.kv_cache import KVCache


class LayerKind(NamedTuple):
    """The layer parameters on which an attention plan depends. Layers of one kind share their plan. The heads are those
    that this rank computes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int


class LibraryPlan(ABC):
    """The plan of a step for a library that replaces Coatcheck's kernels, for layers of one kind."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        cache: KVCache,
        metadata: "AttentionMetadata",
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
    ) -> Tensor:
        """q [T, heads, dim] -> [T, heads, dim], as paged_attention computes it. `metadata`: of the planned step."""


AttentionPlans = Mapping[LayerKind, AttentionPlan | LibraryPlan]


class LocalQueries(NamedTuple):
    """With --mla-shard tokens: a step's T queries as T sequences over the tokens that this rank stores
    (token_shards.py).

    block_tables: int32 [T, max_blocks]
    seq_lens:     int32 [T], the tokens of the query's context that this rank stores; may be 0
    cu_seqlens_q: int32 [T + 1]
    """

    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


class GatheredContext(NamedTuple):
    """With --mla-shard tokens: a step whose ranks gather the latents of all its contexts (token_shards.py).

    blocks:       int64 [B], the blocks of all sequences, one sequence after the other
    block_tables: int32 [S, max_blocks], indices into `blocks`
    plans:        for this rank's heads over all tokens
    """

    blocks: Tensor
    block_tables: Tensor
    plans: dict[LayerKind, AttentionPlan]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of S sequences, flattened; sequence s owns tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1].

    slot_mapping: int64 [T], block * block_size + offset of each token; -1 stores nothing
    block_tables: int32 [S, max_blocks]
    seq_lens:     int32 [S], context length including this step's tokens
    cu_seqlens_q: int32 [S + 1]

    A padding row has slot -1, seq_len 0 and one token; its output is undefined.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    # Whether a query's result has the same bits in a decode and in a prefill (see paged_attention.py).
    batch_invariant: bool = False
    # On a GPU: how the backend computes attention, for each kind of layers. Empty on a CPU.
    plans: AttentionPlans = field(default_factory=dict)
    local: LocalQueries | None = None  # set by `localise`; None if it is not computed yet
    gathered: GatheredContext | None = None  # None: the ranks exchange queries and results
    state_slots: Tensor | None = None  # int64 [S]: the slot of each sequence's states, in a hybrid model
    max_query_len: int = sys.maxsize  # an upper bound of the queries of a sequence
    max_seq_len: int = sys.maxsize  # an upper bound of seq_lens


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens of a step that need logits; vLLM calls them logits_indices.

    The last layer computes attention output and MLP for these tokens only, because the other hidden states are never
    read. In a prefill that saves most of one layer.

    tokens:       int64 [R], ascending indices into the step's tokens
    cu_seqlens_q: int32 [S + 1], element s is the number of `tokens` in the first s sequences; a sequence has 0 or 1
    plans:        as in AttentionMetadata, for these tokens
    """

    tokens: Tensor
    cu_seqlens_q: Tensor
    plans: AttentionPlans = field(default_factory=dict)

    def select_queries(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """`metadata` with `tokens` as the only queries."""
        return replace(metadata, cu_seqlens_q=self.cu_seqlens_q, plans=self.plans, local=None, gathered=None)
