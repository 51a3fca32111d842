"""CudaGraphs: steps of up to 512 tokens as CUDA graphs.

A graph replays the kernels that were launched during its capture, on the same addresses. A step is two replays: the
forward pass of one of a few shapes (graph_shapes.py), and the logits of one of a few numbers of rows. What differs
between steps is data at fixed addresses: the tokens' slots and positions, the sequences, the plans of attention, and
the rows that need logits, which one copy writes. A graph computes all other inputs on the device, from these and the
runner's batch state.

A step with fewer tokens than its shape is padded with tokens at position -1: their slot_mapping is -1 (nothing is
stored) and they are sequences of length 0 (nothing is read). All tokens pass through the last layer, unlike in steps
without graphs, so their hidden states serve prompt logprobs and pooling too.

Without a GPU, the same padded steps run without graphs, for tests.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.workers.attention.attention import LayerCaches
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, AttentionPlans
from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.attention_planner import AttentionPlanner
from coatcheck.workers.runner.graph_shapes import GraphSizes, StepShape, pick_shape
from coatcheck.workers.runner.host_transfer import upload_into

_log = logging.getLogger(__name__)
_Replay = Callable[[], object]
Progress = Callable[[int, int], None]  # (graphs that are captured, all graphs)


class _StepInputs(NamedTuple):
    """Views of the inputs of one shape with T tokens, int32."""

    slots: Tensor  # [T] of each token
    positions: Tensor  # [T]
    sequence_slots: Tensor  # [T] of each sequence
    seq_lens: Tensor  # [T]
    cu_seqlens: Tensor  # [T + 1]
    plans: AttentionPlans


class CudaGraphs:
    """One rank's graphs.

    `token_ids`, `block_tables`: the runner's batch state. `planner`: of attention. `sizes`: empty for no graphs.
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
        sizes: GraphSizes,
    ) -> None:
        self._model = model
        self._layer_caches = layer_caches
        self._token_ids = token_ids
        self._block_tables = block_tables
        self._block_size = block_size
        self._planner = planner
        self._device = token_ids.device
        self._max_rows = max(sizes.decodes, default=0)
        self.row_sizes = sizes.decodes
        self.shapes = sizes.shapes(planner.short_queries)
        ints = max((self._num_ints(shape) for shape in self.shapes), default=0)
        self._inputs = torch.zeros(ints, dtype=torch.int32, device=self._device)  # rows with logits, then a _StepInputs
        self._views = {shape: self._view_inputs(shape) for shape in self.shapes}
        self._logits = torch.zeros(self._max_rows, model.spec.vocab_size, device=self._device)
        self._hidden: Tensor | None = None  # [tokens of the largest shape, hidden_size]
        self.steps = 0
        self.last_shape: StepShape | None = None
        self._forwards: dict[StepShape, _Replay] = {}
        self._heads: dict[int, _Replay] = {}  # by the number of rows, ascending

    @torch.inference_mode()
    def capture(self, progress: Progress = lambda done, total: None) -> None:
        """Capture every shape. If the forward pass cannot be captured, log why; steps then run without graphs.

        `progress`: called after each graph. Raises torch.OutOfMemoryError.
        """
        try:
            self._capture_all(progress)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # transformers' own modules may wait for the device
            architecture, reason = self._model.spec.architecture, str(error).partition("\n")[0]
            _log.warning("no CUDA graphs, so each step launches every kernel: %s (%s)", architecture, reason)
            self.close()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # no step begins beside what the stream of the capture still runs

    def _capture_all(self, progress: Progress) -> None:
        """The largest comes first, so that the smaller graphs reuse its memory."""
        on_gpu = self._device.type == "cuda"
        # One stream for all: the allocator reuses memory only within a stream.
        pool, stream = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)) if on_gpu else (None, None)
        forwards: dict[StepShape, _Replay] = {}
        heads: dict[int, _Replay] = {}
        total = len(self.shapes) + len(self.row_sizes)
        for shape in sorted(self.shapes, reverse=True):
            self._write_inputs([], shape)
            forwards[shape] = self._capture_call(partial(self._forward, shape), pool, stream)
            progress(len(forwards), total)
        for size in reversed(self.row_sizes):
            heads[size] = self._capture_call(partial(self._compute_logits, size), pool, stream)
            progress(len(forwards) + len(heads), total)
        self._forwards, self._heads = forwards, dict(sorted(heads.items()))

    def _capture_call(self, call: Callable[[], None], pool: Any, stream: Any) -> _Replay:
        if stream is None:
            call()
            return call
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            call()  # once without capture, because libraries initialise at their first call
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, the block copier) may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            call()
        replay: _Replay = graph.replay
        return replay

    def pick_shape(self, rows: Sequence[ScheduledSequence]) -> StepShape | None:
        """The captured shape for these rows; None if the step must run without a graph."""
        return pick_shape(rows, self.shapes, self._planner.short_queries) if self._forwards else None

    def replay(self, rows: Sequence[ScheduledSequence], shape: StepShape) -> Tensor:
        """Compute the rows. Returns their tokens' hidden states, [T, hidden_size], valid until the next call."""
        self.steps, self.last_shape = self.steps + 1, shape
        self._write_inputs(rows, shape)
        self._forwards[shape]()
        assert self._hidden is not None
        return self._hidden[: sum(row.num_tokens for row in rows)]

    def replay_logits(self, num_rows: int) -> Tensor:
        """The logits of the `num_rows` rows of the last replay that sample: float32 [num_rows, vocab], valid until the
        next call."""
        self._heads[next(size for size in self.row_sizes if size >= num_rows)]()
        return self._logits[:num_rows]

    def close(self) -> None:
        """Free the graphs; later steps run without."""
        self._forwards, self._heads, self.shapes, self._views = {}, {}, [], {}

    def _num_ints(self, shape: StepShape) -> int:
        return self._max_rows + 5 * shape.num_tokens + 1 + self._planner.num_ints(shape)

    def _view_inputs(self, shape: StepShape) -> _StepInputs:
        tokens = shape.num_tokens
        rest = self._inputs[self._max_rows : self._num_ints(shape)]
        slots, positions, sequence_slots, seq_lens, cu_seqlens, plans = rest.split(
            (tokens, tokens, tokens, tokens, tokens + 1, self._planner.num_ints(shape))
        )
        return _StepInputs(slots, positions, sequence_slots, seq_lens, cu_seqlens, self._planner.view(shape, plans))

    def _write_inputs(self, rows: Sequence[ScheduledSequence], shape: StepShape) -> None:
        upload_into(self._inputs, self._pack_inputs(rows, shape))

    def _pack_inputs(self, rows: Sequence[ScheduledSequence], shape: StepShape) -> NDArray[np.int32]:
        """What `_view_inputs` divides. There are as many sequences as tokens: those of the rows, those of one token for
        padding, and empty ones."""
        tokens = shape.num_tokens
        slots, starts, counts, samples = np.array(rows, np.int32).reshape(-1, 4).T
        ends = np.cumsum(counts, dtype=np.int32)
        used = int(ends[-1]) if len(rows) else 0
        padding = tokens - used
        logits_tokens = _padded(ends[samples > 0] - 1, self._max_rows, 0)
        positions = np.arange(used, dtype=np.int32) + np.repeat(starts - ends + counts, counts)
        cu_seqlens = np.concatenate((ends, used + 1 + np.arange(padding, dtype=np.int32)))
        # Tiles hold many queries of one sequence. In a step without short tiles, padding is one sequence.
        pads = [1] * padding if shape.has_short else [padding] * (padding > 0)
        q_lens, seq_lens = [*counts.tolist(), *pads], [*(starts + counts).tolist(), *[0] * len(pads)]
        return np.concatenate((
            logits_tokens,
            _padded(np.repeat(slots, counts), tokens, 0),
            _padded(positions, tokens, -1),
            _padded(slots, tokens, 0),
            _padded(starts + counts, tokens, 0),
            np.zeros(1, np.int32),
            _padded(cu_seqlens, tokens, tokens),
            self._planner.pack(shape, q_lens, seq_lens),
        ))  # fmt: skip

    def _forward(self, shape: StepShape) -> None:
        inputs = self._views[shape]
        slots, positions = inputs.slots.long(), inputs.positions.long()
        is_real, at = positions >= 0, positions.clamp(min=0)
        blocks = self._block_tables[slots, at // self._block_size].long()
        metadata = AttentionMetadata(
            slot_mapping=torch.where(is_real, blocks * self._block_size + at % self._block_size, -1),
            block_tables=self._block_tables[inputs.sequence_slots.long()],
            seq_lens=inputs.seq_lens,
            cu_seqlens_q=inputs.cu_seqlens,
            batch_invariant=self._model.deterministic,
            plans=inputs.plans,
        )
        hidden = self._model.forward(self._token_ids[slots, at].long(), at, metadata, self._layer_caches)
        if self._hidden is None:  # the first call is not captured
            self._hidden = torch.zeros_like(hidden)
        self._hidden[: shape.num_tokens].copy_(hidden)

    def _compute_logits(self, num_rows: int) -> None:
        assert self._hidden is not None
        tokens = self._inputs[:num_rows].long()
        self._logits[:num_rows].copy_(self._model.logits(self._hidden[tokens]))


def _padded(values: NDArray[np.int32], length: int, padding: int) -> NDArray[np.int32]:
    return np.concatenate((values, np.full(length - len(values), padding, np.int32)))
