"""Token shards: the part of each sequence's latents that one rank stores with --mla-shard tokens. Only arithmetic.

Rank r of n stores the tokens at positions p with p % n == r. n divides the block size, so every rank has a part of
every block. Block ids, block tables, hashes, tiers and evictions are therefore those of a group that stores every token
on every rank. The token at position p is local token p // n of its rank. A rank attends with the same block tables,
with blocks of block_size / n tokens, and with the number of local tokens as each query's context length.

The ranks either exchange queries and results of all heads, or gather the latents of the contexts and attend with their
own heads alone. `gathers_context` chooses the way that moves fewer bytes: a decode exchanges, a prompt gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LocalQueries
from coatcheck.workers.core.model_spec import LayerSpec


def localise(metadata: AttentionMetadata, layer: LayerSpec) -> AttentionMetadata:
    """`metadata` with this rank's slot_mapping, and with `local` unless the context is gathered. `layer`: any layer of
    this rank."""
    slots = local_slots(metadata.slot_mapping, layer)
    local = None if metadata.gathered else local_queries(metadata, layer, len(slots))
    return replace(metadata, slot_mapping=slots, local=local)


def local_slots(slot_mapping: Tensor, layer: LayerSpec) -> Tensor:
    """int64 [T]: the rank's own slot of each token; -1 for tokens of other ranks and for padding."""
    is_own = slot_mapping % layer.token_shards == layer.token_shard
    return torch.where(is_own, slot_mapping // layer.token_shards, -1)


def local_queries(metadata: AttentionMetadata, layer: LayerSpec, num_queries: int) -> LocalQueries:
    """The `num_queries` queries of a step, each as a sequence of its own over the rank's tokens.

    Every rank attends with all heads, so the heads of one query fill a tile, and no tile needs several queries.
    """
    seq_lens, starts = metadata.seq_lens, metadata.cu_seqlens_q
    queries = torch.arange(num_queries + 1, dtype=torch.int32, device=seq_lens.device)
    row = torch.arange(len(seq_lens), device=seq_lens.device)
    row = row.repeat_interleave(starts.diff().long(), output_size=num_queries)
    ends = seq_lens[row] - (starts[1:][row] - queries[1:])  # the context's length of each query
    return LocalQueries(metadata.block_tables[row], _local_lens(ends, layer), queries)


def _local_lens(lens: Tensor, layer: LayerSpec) -> Tensor:
    """How many of the first `lens` tokens of a sequence the rank stores."""
    return (lens + (layer.token_shards - 1 - layer.token_shard)) // layer.token_shards


def count_local_keys(q_lens: Sequence[int], seq_lens: Sequence[int], layer: LayerSpec) -> list[int]:
    """The local context's length of each query, as in `local_queries`, from integers on the host."""
    shards, shard = layer.token_shards, layer.token_shard
    return [
        max(end + shards - 1 - shard, 0) // shards  # `end` may be negative for padding
        for queries, length in zip(q_lens, seq_lens, strict=True)
        for end in range(length - queries + 1, length + 1)
    ]


def exchanged_elements(num_tokens: int, layer: LayerSpec) -> int:
    """The number of elements of one layer's queries and results on each rank in an exchange. `layer`: of this rank."""
    rank = layer.head_dim - layer.rope_head_dim
    return num_tokens * layer.num_heads * layer.token_shards * (layer.head_dim + rank)


def gathers_context(q_lens: Sequence[int], seq_lens: Sequence[int], layer: LayerSpec, max_tokens: int) -> bool:
    """Whether the ranks gather the latents of a step's contexts. `layer`: of this rank.

    They do if the contexts have fewer than `max_tokens` tokens together, and a gather moves at most half as many
    elements as an exchange: a gather holds three copies for a moment. So a gather takes no more memory than the
    exchange of the largest step, by which the KV pool is sized. That step has a context of `max_tokens`.
    """
    context = sum(seq_lens)
    return context < max_tokens and 2 * context * layer.head_dim <= exchanged_elements(sum(q_lens), layer)


def list_blocks(seq_lens: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """(sequence, index in its block table) of each block, one sequence after the other."""
    return [(row, index) for row, length in enumerate(seq_lens) for index in range(-(-length // block_size))]
