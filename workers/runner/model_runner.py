"""ModelRunner: computes step plans on one rank.

The scheduler sends only changes. So every rank keeps a copy of the scheduler's batch state, one row per slot (a running
sequence): token ids, block table and sampling parameters. A step

    1. applies the plan's changes to that state,
    2. runs one forward pass over all rows of the plan,
    3. samples, and writes the new tokens into the state, where the next step reads them.

So sampled tokens do not pass through the host before the next step, and a step can be launched before the host has the
tokens of the step before. In steps of few tokens 2 and 3 are replays of CUDA graphs.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.kv.gather_rows import gather_rows
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED
from coatcheck.kernels.lora.lora_tiles import pack_tiles, view_tiles
from coatcheck.kernels.sampling.token_mask import apply_token_mask
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_backend import AttentionBackend
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.attention.fa3_backend import Fa3Backend
from coatcheck.workers.attention.flashinfer_backend import FlashInferBackend
from coatcheck.workers.core.sampling_form import SamplingFeature
from coatcheck.workers.core.step_plan import DraftToken, ScheduledSequence, StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.block_copier import BlockCopier
from coatcheck.workers.runner.cuda_graphs import CudaGraphs, Progress
from coatcheck.workers.runner.device_step import DeviceStep, LogprobReport
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.host_transfer import HostCopy, upload
from coatcheck.workers.runner.kv_memory import add_states, make_caches, make_states
from coatcheck.workers.runner.pooler import Pooler
from coatcheck.workers.runner.sampler import Sampler
from coatcheck.workers.runner.token_bitmask import TokenBitmasks
from coatcheck.workers.runner.triton_backend import TritonBackend
from coatcheck.workers.runner.warm_up import kernel_plans
from coatcheck.workers.structured.grammar_backend import GrammarBackend
from coatcheck.workers.structured.grammar_compiler import GrammarCompiler

_NO_GRAPHS = GraphSizes()
_PROMPT_LOGITS_ROWS = 64  # at a time for prompt logprobs: float32 [64, vocab] is 31 MiB for a vocabulary of 128,000


class ModelRunner:
    """One rank's model, KV pool and batch state.

    `pool`: uint8 [num_blocks, bytes_per_block]. `copier`: None without a host tier. `communicator`: None for a rank
    without peers. `graph_sizes`: of the CUDA graphs (cuda_graphs.py); used once `warm_up` captured them.
    `num_snapshots`: slots for snapshots of a model's states, after the `max_num_seqs` slots of running sequences.
    `attention_backend`: triton, flashinfer or fa3 (workers/core/attention_selector.py). `finds_forced_tokens`: steps
    report the tokens that grammars force, for engines that draft them.
    """

    def __init__(
        self,
        model: Model,
        layout: BlockLayout,
        pool: Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        copier: BlockCopier | None = None,
        grammars: GrammarBackend | None = None,
        communicator: Communicator | None = None,
        graph_sizes: GraphSizes = _NO_GRAPHS,
        attention_backend: str = "triton",
        num_snapshots: int = 0,
        finds_forced_tokens: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.max_model_len = max_model_len
        self.steps = 0
        self._finds_forced_tokens = finds_forced_tokens
        self._layout = layout
        self._kv_caches = make_caches(layout, pool)
        # A sequence's states have its slot; those of a sequence that starts are zero, whatever the slot holds.
        self._states = make_states(model.spec, max_num_seqs + num_snapshots, pool.device)
        self._layer_caches = add_states(self._kv_caches, self._states)
        self._device = pool.device
        max_blocks = -(-max_model_len // layout.block_size)
        # The batch state, one row per slot. The extra token column is for a token sampled after the last position, and
        # the extra row for padding.
        self._token_ids = torch.zeros(max_num_seqs + 1, max_model_len + 1, dtype=torch.int32, device=self._device)
        self._block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=self._device)
        self._sampler = Sampler(
            max_num_seqs, self._token_ids, merge_over=communicator if model.shards_logits else None,
            vocab_size=model.spec.vocab_size,
        )  # fmt: skip
        self._pooler = Pooler()
        self._adapters = [0] * max_num_seqs  # the LoRA adapter of each slot, as in NewSequence
        grammars = grammars or GrammarBackend(None, "this runner has no grammar backend")
        self._bitmasks = TokenBitmasks(grammars, model.spec.vocab_size, self._device)
        self._grammar_compiler = GrammarCompiler(grammars, (communicator or Communicator()).all_reduce_min)
        self._copier = copier
        self._backend = self._make_backend(attention_backend)
        self.graphs = CudaGraphs(
            model, self._layer_caches, self._token_ids, self._block_tables, self._adapters, self._sampler,
            self._backend, communicator or Communicator(), block_size=layout.block_size,
            sizes=graph_sizes if self._backend.captures_chunks else GraphSizes(graph_sizes.decodes),
        )  # fmt: skip

    def _make_backend(self, name: str) -> AttentionBackend:
        layers, caches, dtype = self.model.spec.layers, self._kv_caches, getattr(torch, self.model.spec.dtype)
        if name == "fa3":
            return Fa3Backend(layers)
        if name == "flashinfer":  # check_backend_model refuses latent layers
            return FlashInferBackend(
                cast("Sequence[AttentionLayer]", layers), cast("list[KVCache]", caches), dtype, self._block_tables
            )
        return TritonBackend(layers, caches, dtype.itemsize, batch_invariant=self.model.deterministic)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Compute a plan. On a GPU, return once the kernels are queued."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches on the thread's GPU, which is 0 in a new thread
        self.steps += 1
        self._grammar_compiler.start_compiling(plan)
        if self._copier is not None:
            self._copier.start_copies(plan)
        self._update_state(plan)
        self._copy_blocks(plan.cow_copies)
        self._copy_states(plan.state_restores)
        if plan.drafts:  # the batch state holds them as if they were known
            slots, positions, token_ids = self._int64(plan.drafts).T
            self._token_ids[slots, positions] = token_ids.to(torch.int32)
        step = self._compute_rows(plan.scheduled, plan.drafts) if plan.scheduled else DeviceStep(0, [], None)
        self._copy_states(plan.state_saves)
        if self._copier is not None:
            step.copy_report = self._copier.report_copies()
        step.num_compiled = self._grammar_compiler.report_compiled()
        return step

    def close(self) -> None:
        """Free the CUDA graphs. NCCL ends a process group only after the graphs that were captured with it."""
        self.graphs.close()

    def _update_state(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self._token_ids[new.slot, : len(new.token_ids)] = self._int32(new.token_ids)
            self._sampler.set_parameters(new)
            self._pooler.set_sequence(new)
            self._adapters[new.slot] = new.adapter
            self._bitmasks.set_grammar(new)
        if plan.table_writes:
            triples = self._int32([(write.slot, write.block_index, write.block) for write in plan.table_writes]).T
            # Of two writes to one entry the later must win, which an indexed store does not guarantee.
            latest = {(write.slot, write.block_index): i for i, write in enumerate(plan.table_writes)}
            if len(latest) < len(plan.table_writes):
                triples = triples[:, self._int64(list(latest.values()))]
            self._block_tables[triples[0].long(), triples[1].long()] = triples[2]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks within the pool (copy-on-write), in order if a block is both a source and a target."""
        if not copies:
            return
        sources, targets = [pair[0] for pair in copies], [pair[1] for pair in copies]
        is_chained = len({*sources, *targets}) < len(copies) + len(set(sources))
        for batch in [[pair] for pair in copies] if is_chained else [copies]:
            pairs = self._int64(batch).T.contiguous()
            copy_blocks(self.pool, pairs[0], pairs[1])

    def _copy_states(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the states of all layers from slot to slot."""
        for state in self._states if pairs else ():
            state.copy_slots(pairs)

    def _compute_rows(self, rows: list[ScheduledSequence], drafts: list[DraftToken]) -> DeviceStep:
        needs_all_tokens = any(
            self._sampler.scores_prompt(row.slot, row.start) or self._pooler.pools(row) for row in rows
        )
        samples = any(row.needs_sample for row in rows)
        reports: dict[int, list[LogprobReport]] = {}
        embeddings: dict[int, HostCopy] = {}
        shape = self.graphs.pick_shape(rows)
        indices = self._logits_indices(rows) if shape is None else None
        if shape is None:
            hidden = self._forward(rows, None if needs_all_tokens else indices)
        else:
            hidden = self.graphs.replay(rows, shape)
        if needs_all_tokens:
            reports = self._prompt_logprobs(rows, hidden)
            embeddings = self._pooler.pool(rows, hidden)
            hidden = hidden if indices is None else hidden[indices.tokens]
        if samples:
            step = self._sample(rows, drafts, hidden if shape is None else None, reports)
        else:
            step = DeviceStep(len(rows), [], None, prompt_logprobs=reports)
        step.embeddings = embeddings
        return step

    def _logits_indices(self, rows: list[ScheduledSequence]) -> LogitsIndices | None:
        """The last token of each row that samples. None if these are all tokens of the step."""
        if all(row.needs_sample and row.num_tokens == 1 for row in rows):
            return None
        ends = accumulate(row.num_tokens for row in rows)
        tokens = [end - 1 for row, end in zip(rows, ends, strict=True) if row.needs_sample]
        counts = accumulate((int(row.needs_sample) for row in rows), initial=0)
        plans = self._backend.make_plans([int(row.needs_sample) for row in rows], _seq_lens(rows))
        return LogitsIndices(self._int64(tokens), self._int32(list(counts)), plans)

    def _forward(self, rows: list[ScheduledSequence], logits_indices: LogitsIndices | None) -> Tensor:
        """Hidden states of the rows' T tokens, [T, hidden]; with `logits_indices`, of its R tokens, [R, hidden]."""
        lens, seq_lens = [row.num_tokens for row in rows], _seq_lens(rows)
        spans = self._int64([(row.slot, row.start, row.num_tokens) for row in rows])
        step = gather_rows(
            spans,
            self._token_ids,
            self._block_tables,
            block_size=self._layout.block_size,
            num_tokens=sum(lens),
            max_seq_len=max(seq_lens),
        )
        gathered = None
        if isinstance(self._backend, TritonBackend):  # check_backend_model refuses latent layers of others
            gathered = self._backend.gather_context(step.block_tables, lens, seq_lens, self.max_model_len)
        metadata = AttentionMetadata(
            slot_mapping=step.slot_mapping,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            cu_seqlens_q=step.cu_seqlens,
            batch_invariant=self.model.deterministic,
            plans={} if gathered else self._backend.make_plans(lens, seq_lens),
            gathered=gathered,
            state_slots=spans[:, 0].contiguous() if self.model.spec.state_layers else None,
            max_query_len=max(lens),
            max_seq_len=max(seq_lens),
        )
        with self._use_adapters(rows, samples_only=logits_indices is not None):
            return self.model.forward(step.input_ids, step.positions, metadata, self._layer_caches, logits_indices)

    def _use_adapters(self, rows: list[ScheduledSequence], *, samples_only: bool) -> AbstractContextManager[None]:
        """Within the context, linears add the adapters of the rows. `samples_only`: the last layer keeps only the
        tokens of LogitsIndices."""
        adapters = [self._adapters[row.slot] for row in rows]
        if not any(adapters):
            return nullcontext()
        pairs = list(zip(rows, adapters, strict=True))
        tokens = [adapter for row, adapter in pairs for _ in range(row.num_tokens)]
        sampled = [adapter for row, adapter in pairs if row.needs_sample]
        lora_step, given = self.model.lora_step, [tokens, sampled] if samples_only else [tokens]
        if not lora_step.num_stacked:
            return lora_step.use(*given)
        packed = [pack_tiles(np.array(each, np.int32), lora_step.num_stacked) for each in given]
        return lora_step.use_tiles(
            *(view_tiles(self._int32(ints), len(each)) for ints, each in zip(packed, given, strict=True))
        )

    def _sample(
        self,
        rows: list[ScheduledSequence],
        drafts: list[DraftToken],
        hidden: Tensor | None,
        prompt_logprobs: dict[int, list[LogprobReport]],
    ) -> DeviceStep:
        """Sample one token for each row with `needs_sample`. `hidden`: of these rows, [sampled rows, hidden]; None if
        the graphs have them."""
        sampled = [index for index, row in enumerate(rows) if row.needs_sample]
        slots = [rows[index].slot for index in sampled]
        positions = [rows[index].start + rows[index].num_tokens for index in sampled]
        features = self._sampler.features(slots)
        form = self._sampler.choose_form(features)
        if hidden is None:
            logits = self.graphs.replay_logits(len(slots), form)
        else:
            logits = self.model.shard_logits(hidden) if form.is_merged else self.model.logits(hidden)
        counts: dict[int, int] = {}
        raw_logits, reported = logits, None
        if SamplingFeature.LOGPROBS in features:
            # Logprobs are of the model's logits, before the mask, bias and penalties change them.
            wanted = ((r, self._sampler.sampling(slot).logprobs) for r, slot in enumerate(slots))
            counts = {r: count for r, count in wanted if count is not None}
            reported = self._int64(list(counts))
            raw_logits = logits[reported]
        failed = self._apply_bitmasks(logits, slots, drafts)
        self._sampler.edit_logits(logits, slots, positions, features)
        if hidden is None:
            token_ids = self.graphs.replay_sampler(form, len(slots))
        else:
            token_ids = self._sampler.sample_rows(form, logits, slots, positions)
        host_copy = HostCopy.start(token_ids)
        self._bitmasks.record_tokens(slots, host_copy, drafts)
        logprobs = None
        if reported is not None:
            listed = ((n, self._sampler.sampling(slots[r]).logprob_token_ids) for n, r in enumerate(counts))
            named = {n: ids for n, ids in listed if ids}
            report = LogprobReport.start(raw_logits, token_ids[reported], list(counts.values()), named)
            logprobs = [sampled[r] for r in counts], report
        failed_rows = {sampled[r]: reason for r, reason in failed.items()}
        step = DeviceStep(len(rows), sampled, host_copy, logprobs, prompt_logprobs, failed=failed_rows)
        if self._finds_forced_tokens:
            planned = len(slots) - len(drafts)
            slot_of = dict(zip(sampled[:planned], slots[:planned], strict=True))
            step.find_forced = partial(self._bitmasks.find_forced, slot_of)
        return step

    def _apply_bitmasks(self, logits: Tensor, slots: list[int], drafts: list[DraftToken]) -> dict[int, str]:
        """Mask the tokens that structured output forbids. Return the reason for each row that cannot continue."""
        masks = self._bitmasks.compute_masks(slots, drafts)
        if masks is None:
            return {}
        rows, bits, failed = masks
        apply_token_mask(logits, self._int64(rows), bits)
        return failed

    def _prompt_logprobs(self, rows: list[ScheduledSequence], hidden: Tensor) -> dict[int, list[LogprobReport]]:
        """Queue the logprobs of prompt tokens. `hidden`: of all tokens of the rows, [T, hidden]."""
        reports: dict[int, list[LogprobReport]] = {}
        firsts = accumulate((row.num_tokens for row in rows), initial=0)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=False)):
            count = self._sampler.prompt_logprobs(row.slot)
            # The hidden state at position p predicts token p + 1, which must belong to the prompt.
            last = min(row.start + row.num_tokens, self._sampler.prompt_len(row.slot) - 1)
            num_scored = last - row.start
            if count is None or num_scored < 1:
                continue
            reports[index] = []
            for at in range(0, num_scored, _PROMPT_LOGITS_ROWS):
                n = min(_PROMPT_LOGITS_ROWS, num_scored - at)
                logits = self.model.logits(hidden[first + at : first + at + n])
                targets = self._token_ids[row.slot, row.start + at + 1 : row.start + at + 1 + n].long()
                reports[index].append(LogprobReport.start(logits, targets, [count] * n))
        return reports

    @torch.inference_mode()
    def warm_up(
        self, progress: Progress = lambda done, total: None, *, max_batch_tokens: int = sys.maxsize
    ) -> None:  # fmt: skip
        """Launch every kernel that serving can need, then capture the CUDA graphs, so nothing compiles while serving.

        `progress`: called with the number of graphs that are captured, and of all graphs. `max_batch_tokens`: of the
        largest step, so that no kernel takes more memory than it does.
        All ranks call this together, before the first plan: it overwrites the pool and the batch state.
        """
        vocab, size = self.model.spec.vocab_size, self._layout.block_size
        max_tokens = min(self._token_ids.shape[1] - 1, len(self.pool) * size)
        for plan in kernel_plans(
            chunk_lengths=[*self._backend.warm_up_lengths, *([MIN_CHUNKED] if self.model.spec.state_layers else [])],
            max_tokens=max_tokens,
            max_model_len=self.max_model_len,
            num_blocks=len(self.pool),
            block_size=size,
        ):
            self.launch(plan).wait()
        self.model.compile_products(max_batch_tokens)
        logits, mask = torch.zeros(1, vocab, device=self._device), [[-1] * -(-vocab // 32)]
        apply_token_mask(logits, self._int64([0]), self._int32(mask))
        self.graphs.capture(progress)

    @property
    def unmeasured_bytes(self) -> int:
        """Bytes that a step of attention may need beyond what the largest steps of a start allocated."""
        return self._backend.unmeasured_bytes

    def wait_for_copies(self) -> None:
        """Wait until no copy between tiers is in progress on any rank. All ranks call this together."""
        while self._copier is not None and self._copier.report_copies() is not None:
            pass

    def _int32(self, values: object) -> Tensor:
        return upload(values, torch.int32, self._device)

    def _int64(self, values: object) -> Tensor:
        return upload(values, torch.int64, self._device)


def _seq_lens(rows: Sequence[ScheduledSequence]) -> list[int]:
    """The context lengths, with this step's tokens."""
    return [row.start + row.num_tokens for row in rows]
