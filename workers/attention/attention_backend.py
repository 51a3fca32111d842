"""AttentionBackend: the interface between the runner and what computes attention. One object per rank plans each step.

workers/core/attention_selector.py says which backend serves which model and host.

    TritonBackend (workers/runner/triton_backend.py)             our kernels, with plans in one copy to the device
    FlashInferBackend (workers/attention/flashinfer_backend.py)  FlashInfer, which plans on the host
    Fa3Backend (workers/attention/fa3_backend.py)                FlashAttention-3, which plans on the device

A step without a graph calls `make_plans`. For a CUDA graph the runner makes `view` once for each shape, and before each
replay calls `pack` and copies its integers to where the view reads them. `attend_cache` (attention.py) gives each layer
the plan of its kind.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.workers.attention.attention_metadata import AttentionPlans


class StepShape(NamedTuple):
    """The shape of a captured step. `num_tokens`: with padding. `has_short`, `has_wide`: which tiles of attention it
    has, or for a library: whether it has decodes, and whether it has chunks of prompts."""

    num_tokens: int
    has_short: bool
    has_wide: bool


class AttentionBackend(Protocol):
    """Plans steps for every kind of layers."""

    @property
    def warm_up_lengths(self) -> Sequence[int]:
        """Chunk lengths that, with a decode, use every kernel that serving can need."""

    @property
    def short_queries(self) -> tuple[int, int]:
        """(fewest, most) queries of a sequence up to which it counts as short, over the kinds of layers."""

    @property
    def captures_chunks(self) -> bool:
        """Whether a CUDA graph can hold steps with chunks of prompts. Decodes can always be captured."""

    @property
    def unmeasured_bytes(self) -> int:
        """Bytes of partial results that a step may need beyond what the largest steps of a start allocated."""

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionPlans:
        """The plans of a step. `q_lens`: queries of each sequence. `seq_lens`: with this step's tokens.

        At most two calls precede a step: one for all tokens, and one for those that need logits.
        """

    def num_ints(self, shape: StepShape) -> int:
        """The size of the array that `pack` returns."""

    def pack(self, shape: StepShape, q_lens: Sequence[int], seq_lens: Sequence[int]) -> NDArray[np.int32]:
        """Plan a step for a CUDA graph of `shape`: int32 [num_ints], for the step's copy to the device.

        Padding is among the sequences, with seq_len 0. A backend with buffers of its own queues the copies to them.
        """

    def view(self, shape: StepShape, packed: Tensor) -> AttentionPlans:
        """The plans that a CUDA graph of `shape` reads. `packed`: int32 [num_ints] on the device, where what `pack`
        returns will be."""
