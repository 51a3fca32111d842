"""CudaGraphs: steps of up to 2048 tokens as CUDA graphs.

A graph replays the kernels that were launched during its capture, on the same addresses. A step is three replays: the
forward pass of one of a few shapes (graph_shapes.py), and the logits and the sampler of one of a few numbers of rows,
the sampler in one of its forms (sampling_form.py). What differs between steps is data at fixed addresses: the tokens'
slots and positions, the sequences, the plans of attention, the tiles of LoRA adapters, and the rows that sample, which
one copy writes. A graph computes all other inputs on the device, from these, the runner's batch state and the sampler's
parameters. If the model has adapters, every graph launches the kernels that add them. In a step without adapters all
tiles are empty, and these kernels end at once.

Between the replays of logits and sampler, a step launches what changes the logits by lists of the host: grammar masks,
biases, forbidden and forced tokens. Log-probabilities are launched beside the sampler.

A step with fewer tokens than its shape is padded with tokens at position -1: their slot_mapping is -1 (nothing is
stored) and they are sequences of length 0 (nothing is read). All tokens pass through the last layer, unlike in steps
without graphs, so their hidden states serve prompt logprobs and pooling too.

Either all ranks have graphs or none has: a rank without graphs would call other collectives than ranks that replay
them. So after each call of a capture the ranks tell each other whether it failed (`_call_on_all_ranks`).

Without a GPU, the same padded steps run without graphs, for tests.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.kernels.lora import lora_tiles
from coatcheck.workers.attention.attention import LayerCaches
from coatcheck.workers.attention.attention_backend import AttentionBackend, StepShape
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, AttentionPlans
from coatcheck.workers.core.runner_protocol import PeerLost
from coatcheck.workers.core.sampling_form import SamplingForm
from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.graph_shapes import GraphSizes, pick_shape
from coatcheck.workers.runner.host_transfer import upload_into
from coatcheck.workers.runner.sampler import Sampler

_log = logging.getLogger(__name__)
_Replay = Callable[[], object]
Progress = Callable[[int, int], None]  # (graphs that are captured, all graphs)


class _CannotCapture(Exception):
    """Every rank raises this if one of them cannot capture a graph. Steps without graphs can run."""


class _RowInputs(NamedTuple):
    """Views of the inputs of the rows that sample, int32 [rows] each, padded to the largest number of rows."""

    tokens: Tensor  # which of the step's tokens has the row's logits
    slots: Tensor
    positions: Tensor  # of the token that is sampled


class _StepInputs(NamedTuple):
    """Views of the inputs of one shape with T tokens, int32."""

    slots: Tensor  # [T] of each token
    positions: Tensor  # [T]
    sequence_slots: Tensor  # [T] of each sequence
    seq_lens: Tensor  # [T]
    cu_seqlens: Tensor  # [T + 1]
    plans: AttentionPlans
    lora: tuple[lora_tiles.LoraTiles, ...]  # none if the model has no adapters


class CudaGraphs:
    """One rank's graphs.

    `token_ids`, `block_tables`: the runner's batch state. `adapters`: the LoRA adapter of each slot, which the runner
    changes; 0 for none. `sampler`: of the same slots. `backend`: of attention.
    `communicator`: between the ranks that capture the same graphs. `sizes`: empty for no graphs.
    """

    def __init__(
        self,
        model: Model,
        layer_caches: LayerCaches,
        token_ids: Tensor,
        block_tables: Tensor,
        adapters: Sequence[int],
        sampler: Sampler,
        backend: AttentionBackend,
        communicator: Communicator,
        *,
        block_size: int,
        sizes: GraphSizes,
    ) -> None:
        self._model = model
        self._layer_caches = layer_caches
        self._token_ids = token_ids
        self._block_tables = block_tables
        self._adapters = adapters
        self._sampler = sampler
        self._block_size = block_size
        self._backend = backend
        self._communicator = communicator
        self._device = token_ids.device
        self._max_rows = max(sizes.decodes, default=0)
        self.row_sizes = sizes.decodes
        self.shapes = sizes.shapes(backend.short_queries)
        ints = max((self._num_ints(shape) for shape in self.shapes), default=0)
        self._inputs = torch.zeros(ints, dtype=torch.int32, device=self._device)  # a _RowInputs, then a _StepInputs
        self._rows = _RowInputs(*self._inputs[: 3 * self._max_rows].split(self._max_rows)) if ints else None
        self._views = {shape: self._view_inputs(shape) for shape in self.shapes}
        self._logits = torch.zeros(self._max_rows, model.spec.vocab_size, device=self._device)
        self._part_size = 0  # of `_logits`' columns in merged forms
        self._tokens = torch.zeros(self._max_rows, dtype=torch.int64, device=self._device)  # what the rows sampled
        self._hidden: Tensor | None = None  # [tokens of the largest shape, hidden_size]
        self.steps = 0
        self.last_shape: StepShape | None = None
        self._forwards: dict[StepShape, _Replay] = {}
        self._heads: dict[tuple[bool, int], _Replay] = {}  # by whether only this rank's tokens, and the number of rows
        self._samplers: dict[tuple[SamplingForm, int], _Replay] = {}  # by form and the number of rows

    @torch.inference_mode()
    def capture(self, progress: Progress = lambda done, total: None) -> None:
        """Capture every shape. If a rank cannot, rank 0 logs why, and the steps of all ranks run without graphs.

        All ranks call this together. `progress`: called after each graph. Raises torch.OutOfMemoryError, and PeerLost
        if another rank failed and cannot go on.
        """
        try:
            self._capture_all(progress)
        except _CannotCapture as error:
            if self._communicator.rank == 0:
                architecture = self._model.spec.architecture
                _log.warning("no CUDA graphs, so each step launches every kernel: %s (%s)", architecture, error)
            self.close()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # no step begins beside what the stream of the capture still runs

    def _capture_all(self, progress: Progress) -> None:
        """The largest comes first, so that the smaller graphs reuse its memory."""
        on_gpu = self._device.type == "cuda"
        # One stream for all: the allocator reuses memory only within a stream.
        pool, stream = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)) if on_gpu else (None, None)
        forwards: dict[StepShape, _Replay] = {}
        heads: dict[tuple[bool, int], _Replay] = {}
        samplers: dict[tuple[SamplingForm, int], _Replay] = {}
        forms = self._sampler.forms
        kinds = sorted({form.is_merged for form in forms})
        total = len(self.shapes) + len(self.row_sizes) * (len(kinds) + len(forms))
        for shape in sorted(self.shapes, reverse=True):
            self._write_inputs([], shape)
            forwards[shape] = self._capture_call(partial(self._forward, shape), pool, stream)
            progress(len(forwards), total)
        for size in reversed(self.row_sizes):
            for is_part in kinds:
                heads[is_part, size] = self._capture_call(partial(self._compute_logits, is_part, size), pool, stream)
            for form in forms:
                samplers[form, size] = self._capture_call(partial(self._sample, form, size), pool, stream)
            progress(len(forwards) + len(heads) + len(samplers), total)
        self._forwards, self._heads, self._samplers = forwards, heads, samplers

    def _capture_call(self, call: Callable[[], None], pool: Any, stream: Any) -> _Replay:
        if stream is None:
            self._call_on_all_ranks(call, is_captured=False)
            return call
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Once without capture, because libraries initialise at their first call.
            self._call_on_all_ranks(call, is_captured=False)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()

        def capture() -> None:
            # Other threads (NCCL's watchdog, the block copier) may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()

        self._call_on_all_ranks(capture, is_captured=True)
        replay: _Replay = graph.replay
        return replay

    def _call_on_all_ranks(self, call: Callable[[], None], *, is_captured: bool) -> None:
        """Make one call of a capture, and learn from all ranks whether it failed there.

        Raises _CannotCapture on every rank if a RuntimeError ended a captured call, or ended the call on every rank:
        transformers' own modules may wait for the device. After any other failure all ranks raise, and the group ends:
        memory is full, or GPUs wait in a collective for the rank that failed. No host waits for such a GPU first: only
        the begin of a graph's capture waits, and it follows a call that failed on no rank.
        """
        failure: Exception | None = None
        try:
            call()
        except PeerLost:
            raise
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failure = error
        ranks = self._communicator
        try:
            if min(ranks.all_reduce_min([int(failure is None)])):
                return
            ends_group = failure is not None and (
                isinstance(failure, torch.OutOfMemoryError) or not isinstance(failure, RuntimeError)
            )
            outcomes = ranks.all_gather_json({"reason": _describe(failure), "ends_group": ends_group})
        except PeerLost:
            if failure is not None:  # the others may wait for this rank's call until their timeout
                raise failure from None
            raise
        failed = {rank: outcome["reason"] for rank, outcome in enumerate(outcomes) if outcome["reason"]}
        rank, reason = next(iter(failed.items()))
        can_go_on = is_captured or len(failed) == len(outcomes)
        if can_go_on and not any(outcome["ends_group"] for outcome in outcomes):
            raise _CannotCapture(reason if len(outcomes) == 1 else f"rank {rank}: {reason}") from failure
        raise failure or PeerLost(f"rank {rank} failed while CUDA graphs were captured ({reason}); see its log")

    def pick_shape(self, rows: Sequence[ScheduledSequence]) -> StepShape | None:
        """The captured shape for these rows; None if the step must run without a graph."""
        if not self._forwards or sum(row.needs_sample for row in rows) > self._max_rows:
            return None
        return pick_shape(rows, self.shapes, self._backend.short_queries)

    def replay(self, rows: Sequence[ScheduledSequence], shape: StepShape) -> Tensor:
        """Compute the rows. Returns their tokens' hidden states, [T, hidden_size], valid until the next call."""
        self.steps, self.last_shape = self.steps + 1, shape
        self._write_inputs(rows, shape)
        self._forwards[shape]()
        assert self._hidden is not None
        return self._hidden[: sum(row.num_tokens for row in rows)]

    def replay_logits(self, num_rows: int, form: SamplingForm) -> Tensor:
        """The logits of the `num_rows` rows of the last replay that sample: float32 [num_rows, vocab], valid until the
        next call. For a merged form only those of this rank's tokens are computed."""
        self._heads[form.is_merged, self._row_size(num_rows)]()
        return self._logits[:num_rows]

    def replay_sampler(self, form: SamplingForm, num_rows: int) -> Tensor:
        """Sample from the logits of `replay_logits`, which the caller may have changed in place. Returns the tokens,
        int64 [num_rows], valid until the next call, and writes them into the runner's `token_ids`."""
        self._samplers[form, self._row_size(num_rows)]()
        return self._tokens[:num_rows]

    def close(self) -> None:
        """Free the graphs; later steps run without."""
        self._forwards, self._heads, self._samplers, self.shapes, self._views = {}, {}, {}, [], {}

    def _row_size(self, num_rows: int) -> int:
        return next(size for size in self.row_sizes if size >= num_rows)

    def _num_ints(self, shape: StepShape) -> int:
        return 3 * self._max_rows + 5 * shape.num_tokens + 1 + self._backend.num_ints(shape) + self._lora_ints(shape)

    def _lora_ints(self, shape: StepShape) -> int:
        count = self._model.lora_step.num_stacked
        return lora_tiles.num_ints(shape.num_tokens, count) if count else 0

    def _view_inputs(self, shape: StepShape) -> _StepInputs:
        tokens = shape.num_tokens
        rest = self._inputs[3 * self._max_rows : self._num_ints(shape)]
        slots, positions, sequence_slots, seq_lens, cu_seqlens, plans, lora = rest.split(
            (tokens, tokens, tokens, tokens, tokens + 1, self._backend.num_ints(shape), self._lora_ints(shape))
        )
        tiles = (lora_tiles.view_tiles(lora, tokens),) if self._model.lora_step.num_stacked else ()
        return _StepInputs(
            slots, positions, sequence_slots, seq_lens, cu_seqlens, self._backend.view(shape, plans), tiles
        )  # fmt: skip

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
        sampled = samples > 0
        positions = np.arange(used, dtype=np.int32) + np.repeat(starts - ends + counts, counts)
        cu_seqlens = np.concatenate((ends, used + 1 + np.arange(padding, dtype=np.int32)))
        # Tiles hold many queries of one sequence. In a step without short tiles, padding is one sequence.
        pads = [1] * padding if shape.has_short else [padding] * (padding > 0)
        q_lens, seq_lens = [*counts.tolist(), *pads], [*(starts + counts).tolist(), *[0] * len(pads)]
        return np.concatenate((
            _padded(ends[sampled] - 1, self._max_rows, 0),
            _padded(slots[sampled], self._max_rows, self._sampler.padding_slot),
            _padded((starts + counts)[sampled], self._max_rows, 0),
            _padded(np.repeat(slots, counts), tokens, 0),
            _padded(positions, tokens, -1),
            _padded(slots, tokens, 0),
            _padded(starts + counts, tokens, 0),
            np.zeros(1, np.int32),
            _padded(cu_seqlens, tokens, tokens),
            self._backend.pack(shape, q_lens, seq_lens),
            *self._pack_lora(slots, counts, shape),
        ))  # fmt: skip

    def _pack_lora(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], shape: StepShape
    ) -> list[NDArray[np.int32]]:
        if not (count := self._model.lora_step.num_stacked):
            return []
        adapters = np.array([self._adapters[slot] for slot in slots.tolist()], np.int32)
        return [lora_tiles.pack_tiles(_padded(np.repeat(adapters, counts), shape.num_tokens, 0), count)]

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
            state_slots=inputs.sequence_slots.long(),
            max_query_len=min(shape.num_tokens, sys.maxsize if shape.has_wide else self._backend.short_queries[0]),
        )
        with self._model.lora_step.use_tiles(*inputs.lora):
            hidden = self._model.forward(self._token_ids[slots, at].long(), at, metadata, self._layer_caches)
        if self._hidden is None:  # the first call is not captured
            self._hidden = torch.zeros_like(hidden)
        self._hidden[: shape.num_tokens].copy_(hidden)

    def _compute_logits(self, is_part: bool, num_rows: int) -> None:
        assert self._hidden is not None and self._rows is not None
        tokens = self._rows.tokens[:num_rows].long()
        if is_part:
            logits = self._model.shard_logits(self._hidden[tokens])
            self._part_size = logits.shape[1]
        else:
            logits = self._model.logits(self._hidden[tokens])
        self._logits[:num_rows, : logits.shape[1]].copy_(logits)

    def _sample(self, form: SamplingForm, num_rows: int) -> None:
        assert self._rows is not None
        slots, positions = self._rows.slots[:num_rows].long(), self._rows.positions[:num_rows].long()
        logits = self._logits[:num_rows, : self._part_size if form.is_merged else None]
        self._tokens[:num_rows].copy_(self._sampler.sample(form, logits, slots, positions))


def _padded(values: NDArray[np.int32], length: int, padding: int) -> NDArray[np.int32]:
    return np.concatenate((values, np.full(length - len(values), padding, np.int32)))


def _describe(failure: Exception | None) -> str:
    """The first line of what failed, in at most 200 printable ASCII characters; "" for None."""
    if failure is None:
        return ""
    line = str(failure).partition("\n")[0] or type(failure).__name__
    return "".join(character if " " <= character <= "~" else "?" for character in line)[:200]
