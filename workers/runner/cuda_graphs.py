"""CudaGraphs: a decode step as one CUDA graph, for a few batch sizes.

    pick(rows) -> a size, or None: then the step runs as any other
    logits(rows, size) -> float32 [len(rows), vocab]

A graph repeats what was launched when it was captured, so nothing of a step may lie outside of tensors that stay where
they are: a step writes (slot, position) of each row into one of them, and all else follows from that and from the
runner's mirror on the device. Rows up to the graph's size are padding: position -1 makes them store nothing (slot -1)
and read nothing (seq_len 0). Without a GPU the same padded step is computed anew each time, which tests rely on. It
does not know requests, nor how tokens are drawn.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coatcheck.workers.attention.attention import KVPools
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.core.step_plan import Row
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.host_transfer import upload

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """What is captured: steps that waste at most half of their rows, and few sizes, as each takes time and memory."""
    largest = min(max_num_seqs, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


def pick_size(rows: Sequence[Row], sizes: Sequence[int], most_tokens: int) -> int | None:
    """The smallest size that holds a step of decodes, whose contexts together have at most `most_tokens`; None where
    there is none, or where the step does anything else."""
    if not rows or any(row.num_tokens != 1 or not row.sample for row in rows):
        return None
    if sum(row.start + 1 for row in rows) > most_tokens:
        return None
    return next((size for size in sizes if size >= len(rows)), None)


class CudaGraphs:
    """Of one rank; `tokens` and `tables` are the runner's mirror. Sizes are ascending; none: no step is ever picked."""

    def __init__(
        self,
        model: Model,
        kv: KVPools,
        tokens: Tensor,
        tables: Tensor,
        *,
        block_size: int,
        sizes: Sequence[int],
        most_tokens: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._tokens = tokens
        self._tables = tables
        self._block_size = block_size
        self.sizes = tuple(sizes)
        # More than the pool holds is in use where sequences share blocks: such steps go without a graph.
        self._most_tokens = most_tokens
        self._device = tokens.device
        largest = max(self.sizes, default=0)
        self._rows = torch.zeros(2, largest, dtype=torch.int64, device=self._device)  # slots, positions
        self._logits = torch.zeros(largest, model.spec.vocab_size, device=self._device)
        self.steps = 0
        self.last_size: int | None = None
        self._replays: dict[int, Callable[[], object]] = {}

    def pick(self, rows: Sequence[Row]) -> int | None:
        """The captured size that computes these rows."""
        return pick_size(rows, tuple(self._replays), self._most_tokens)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every size, the largest first: the others then live in the memory that it left."""
        graphs: dict[int, Callable[[], object]] = {}
        on_gpu = self._device.type == "cuda"
        # One stream, since the allocator hands memory on only within a stream.
        pool, side = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)) if on_gpu else (None, None)
        for size in reversed(self.sizes):
            self._set([], size)
            graphs[size] = self._captured(size, pool, side) if on_gpu else partial(self._compute, size)
        self._replays = dict(sorted(graphs.items()))

    def logits(self, rows: Sequence[Row], size: int) -> Tensor:
        """Computes the rows; the result is good until the next call."""
        self.steps, self.last_size = self.steps + 1, size
        self._set(rows, size)
        self._replays[size]()
        return self._logits[: len(rows)]

    def _captured(self, size: int, pool: Any, side: Any) -> Callable[[], object]:
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._compute(size)  # what libraries set up at the first call is no part of a graph
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog and the copier call CUDA from threads of their own meanwhile, which they may.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            self._compute(size)
        return graph.replay

    def _set(self, rows: Sequence[Row], size: int) -> None:
        padding = size - len(rows)
        columns = [[row.slot for row in rows] + [0] * padding, [row.start for row in rows] + [-1] * padding]
        self._rows[:, :size].copy_(upload(columns, torch.int64, self._device))

    def _compute(self, size: int) -> None:
        slots, positions = self._rows[0, :size], self._rows[1, :size]
        real, at = positions >= 0, positions.clamp(min=0)
        blocks = self._tables[slots, at // self._block_size].long()
        metadata = AttentionMetadata(
            slot_mapping=torch.where(real, blocks * self._block_size + at % self._block_size, -1),
            block_tables=self._tables[slots],
            seq_lens=(positions + 1).to(torch.int32),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            max_seqlen_q=1,
            max_seq_len=self._tokens.shape[1] - 1,
            batch_invariant=self._model.deterministic,
            total_seq_len=self._most_tokens,
        )
        hidden = self._model.forward(self._tokens[slots, at].long(), at, metadata, self._kv)
        self._logits[:size].copy_(self._model.logits(hidden))
