"""AttentionMetadata and LogitsIndices: where the tokens of one step sit in the paged KV pool, and which need logits.

The runner builds both once per step, with tensors on the rank's device, and passes them through the model's kwargs.
"""

from dataclasses import dataclass, replace

from torch import Tensor


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
    max_seqlen_q: int
    # Whether a query's result has the same bits in a decode and in a prefill (see paged_attention.py).
    batch_invariant: bool = False
    # Upper bound of the sum of seq_lens; None if unknown.
    total_seq_len: int | None = None
    # Number of sequences with several tokens in this step; the others have one each. None if unknown.
    num_prefills: int | None = None


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens of a step that need logits; vLLM calls them logits_indices.

    The last layer computes attention output and MLP for these tokens only, because the other hidden states are never
    read. In a prefill that saves most of one layer.

    tokens:       int64 [R], ascending indices into the step's tokens
    cu_seqlens_q: int32 [S + 1], element s is the number of `tokens` in the first s sequences; at most one each
    """

    tokens: Tensor
    cu_seqlens_q: Tensor

    def select_queries(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """`metadata` with `tokens` as the only queries."""
        return replace(metadata, cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=1)
