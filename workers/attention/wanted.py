"""LogitsIndices: the tokens of a step whose hidden states are asked for, at most the last of each sequence.

All others only have to leave their keys and values in the pool, so that a model may end its last layer with these
rows alone: a prefill is cheaper by most of one layer, a chunk in the middle of a prompt by all of its head.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from coatcheck.workers.attention.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """tokens: int64 [R], ascending; cu_seqlens_q: int32 [S + 1], how many of them the first s sequences have."""

    tokens: Tensor
    cu_seqlens_q: Tensor

    def narrow(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The same step, with these tokens as its only queries."""
        return replace(metadata, cu_seqlens_q=self.cu_seqlens_q, max_seqlen_q=1)
