"""CudaGraphs: decode steps as CUDA graphs, one graph for each of a few batch sizes.

A graph replays the kernels that were launched during its capture, on the same addresses. So a step writes the slot and
position of each row into one fixed tensor, and its plan of attention into another. The graph computes all other inputs
on the device, from these tensors and the runner's batch state. A step with fewer rows than the graph is padded with
rows at position -1: their slot_mapping is -1 (nothing is stored) and their seq_len is 0 (nothing is read).

Without a GPU, the same padded step runs without a graph, for tests.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coatcheck.workers.attention.attention import LayerCaches
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.attention_planner import AttentionPlanner
from coatcheck.workers.runner.host_transfer import upload

_log = logging.getLogger(__name__)
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes to capture. At most half of a step is padding. Each size takes time at startup, and memory."""
    largest = min(max_num_seqs, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


def pick_capture_size(rows: Sequence[ScheduledSequence], sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `rows`. None if no size does, or if a row is not a decode."""
    if not rows or any(row.num_tokens != 1 or not row.needs_sample for row in rows):
        return None
    return next((size for size in sizes if size >= len(rows)), None)


class CudaGraphs:
    """One rank's graphs.

    `token_ids`, `block_tables`: the runner's batch state. `planner`: of attention. `sizes`: ascending; empty for no
    graphs.
    """

    def __init__(
        self,
        model: Model,
        layer_caches: LayerCaches,
        token_ids: Tensor,
        block_tables: Tensor,
        planner: AttentionPlanner,
        *,
        block_size: int,
        sizes: Sequence[int],
    ) -> None:
        self._model = model
        self._layer_caches = layer_caches
        self._token_ids = token_ids
        self._block_tables = block_tables
        self._block_size = block_size
        self._planner = planner
        self.sizes = tuple(sizes)
        self._device = token_ids.device
        largest = max(self.sizes, default=0)
        self._inputs = torch.zeros(2, largest, dtype=torch.int64, device=self._device)  # slots, positions
        self._plans = {size: planner.allocate_decodes(size) for size in self.sizes}
        self._logits = torch.zeros(largest, model.spec.vocab_size, device=self._device)
        self.steps = 0
        self.last_size: int | None = None
        self._replays: dict[int, Callable[[], object]] = {}  # by size, ascending

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size. If the forward pass cannot be captured, log why; steps then run without graphs.

        Raises torch.OutOfMemoryError.
        """
        try:
            self._replays = self._capture_all()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # transformers' own modules may wait for the device
            architecture, reason = self._model.spec.architecture, str(error).partition("\n")[0]
            _log.warning("no CUDA graphs, so each decode step launches every kernel: %s (%s)", architecture, reason)
            self.sizes, self._plans = (), {}
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # no step begins beside what the stream of the capture still runs

    def _capture_all(self) -> dict[int, Callable[[], object]]:
        """The largest comes first, so that the smaller graphs reuse its memory."""
        replays: dict[int, Callable[[], object]] = {}
        on_gpu = self._device.type == "cuda"
        # One stream for all: the allocator reuses memory only within a stream.
        pool, stream = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)) if on_gpu else (None, None)
        for size in reversed(self.sizes):
            self._write_inputs([], size)
            if on_gpu:
                replays[size] = self._capture_size(size, pool, stream)
            else:
                self._forward(size)  # as a capture does
                replays[size] = partial(self._forward, size)
        return dict(sorted(replays.items()))

    def _capture_size(self, size: int, pool: Any, stream: Any) -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(size)  # once without capture, because libraries initialise at their first call
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, the block copier) may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._forward(size)
        return graph.replay

    def pick_size(self, rows: Sequence[ScheduledSequence]) -> int | None:
        """The captured size for these rows; None if the step must run without a graph."""
        return pick_capture_size(rows, tuple(self._replays))

    def replay(self, rows: Sequence[ScheduledSequence], size: int) -> Tensor:
        """Compute the rows. Returns float32 [len(rows), vocab], valid until the next call."""
        self.steps, self.last_size = self.steps + 1, size
        self._write_inputs(rows, size)
        self._replays[size]()
        return self._logits[: len(rows)]

    def close(self) -> None:
        """Free the graphs; later steps run without."""
        self._replays = {}

    def _write_inputs(self, rows: Sequence[ScheduledSequence], size: int) -> None:
        padding = size - len(rows)
        columns = [[row.slot for row in rows] + [0] * padding, [row.start for row in rows] + [-1] * padding]
        self._inputs[:, :size].copy_(upload(columns, torch.int64, self._device))
        self._planner.write_decodes(self._plans[size][0], [row.start + 1 for row in rows] + [0] * padding)

    def _forward(self, size: int) -> None:
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        is_real, at = positions >= 0, positions.clamp(min=0)
        blocks = self._block_tables[slots, at // self._block_size].long()
        metadata = AttentionMetadata(
            slot_mapping=torch.where(is_real, blocks * self._block_size + at % self._block_size, -1),
            block_tables=self._block_tables[slots],
            seq_lens=(positions + 1).to(torch.int32),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            batch_invariant=self._model.deterministic,
            plans=self._plans[size][1],
        )
        hidden = self._model.forward(self._token_ids[slots, at].long(), at, metadata, self._layer_caches)
        self._logits[:size].copy_(self._model.logits(hidden))
