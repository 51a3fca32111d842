"""AttentionMetadata: where one step's tokens sit in the paged KV pool.

Tensors on the rank's device, built once per step by the runner and handed through the model's kwargs.
It does not know which request a row belongs to.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of S sequences, flattened; sequence s owns tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1].

    slot_mapping: int64 [T], block * block_size + offset of each token, -1 stores nothing
    block_tables: int32 [S, max_blocks]
    seq_lens:     int32 [S], context length with this step's tokens
    cu_seqlens_q: int32 [S + 1]

    Rows of padding have slot -1, seq_len 0 and one token; what comes out of theirs means nothing.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seq_len: int
    # Whether a query's result must be the same bits in a decode and in a prefill (see paged_attention.py).
    one_order: bool = False
    # All context lengths together do not exceed it; None where nobody has added them up.
    total_seq_len: int | None = None
    # How many sequences bring several tokens, where the others bring one each; None where nobody has counted.
    num_prefills: int | None = None
