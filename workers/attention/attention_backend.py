"""AttentionBackend: the runner's interface to a library of attention kernels. One object per rank plans each step.

workers/core/attention_selector.py decides which backend serves which model and host.

    TritonBackend (workers/runner/triton_backend.py)             Coatcheck's kernels; plans go to the device in one copy
    FlashInferBackend (workers/attention/flashinfer_backend.py)  FlashInfer, which plans on the host
    Fa3Backend (workers/attention/fa3_backend.py)                FlashAttention-3, which plans on the device

For a step without a CUDA graph the runner calls `make_plans`. For a CUDA graph it calls `view` once for each shape.
Before each replay it calls `pack`, and copies the integers to the memory that the view reads. `attend_cache`
(attention.py) gives each layer the plan of its kind.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.workers.attention.attention_metadata import AttentionPlans


class StepShape(NamedTuple):
    """The shape of a captured step. `num_tokens`: with padding. `has_short`, `has_wide`: whether the step has short and
    wide tiles of queries (attention_plan.py), or for a library, whether it has decodes and chunks of prompts."""

    num_tokens: int
    has_short: bool
    has_wide: bool


class AttentionBackend(Protocol):
    """Plans the attention of a step, for every kind of layers."""

    @property
    def warm_up_lengths(self) -> Sequence[int]:
        """Chunk lengths for the warm-up. Steps with a chunk of each of these lengths, and decodes, together run every
        kernel that serving can need."""

    @property
    def short_queries(self) -> tuple[int, int]:
        """The most queries of a short sequence: (the smallest, the largest) of this limit over the kinds of layers."""

    @property
    def captures_chunks(self) -> bool:
        """Whether a CUDA graph can capture steps with chunks of prompts. Decodes can always be captured."""

    @property
    def unmeasured_bytes(self) -> int:
        """Bytes of partial results that a step may need beyond those that the largest steps of the warm-up allocate."""

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionPlans:
        """The plans of a step. `q_lens`: queries of each sequence. `seq_lens`: context length of each sequence,
        including this step's tokens.

        It is called at most twice before a step runs: for all tokens, and for the tokens that need logits.
        """

    def num_ints(self, shape: StepShape) -> int:
        """The number of integers that `pack` returns."""

    def pack(self, shape: StepShape, q_lens: Sequence[int], seq_lens: Sequence[int]) -> NDArray[np.int32]:
        """Plan a step for a CUDA graph of `shape`: int32 [num_ints], for the step's copy to the device.

        Padding counts as sequences with seq_len 0. A backend with its own device buffers queues the copies to them.
        """

    def view(self, shape: StepShape, packed: Tensor) -> AttentionPlans:
        """The plans that a CUDA graph of `shape` reads. `packed`: int32 [num_ints] on the device. Before each replay it
        gets what `pack` returns."""
