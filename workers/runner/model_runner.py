"""ModelRunner: carries out step plans on one rank.

Keeps the rank's mirror of the scheduler's state, one row per slot: token ids, block table, sampling parameters. A plan
changes the mirror, then one forward pass computes all its rows, and the sampler writes new tokens into the mirror,
where the next plan finds them. It does not know requests, nor why a row is in a plan.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from coatcheck.kernels.attention.paged_prefill import chunk_lengths
from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.sampling.token_mask import apply_token_mask
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.core.step_plan import Row, StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model
from coatcheck.workers.runner.block_copier import BlockCopier
from coatcheck.workers.runner.cuda_graphs import CudaGraphs
from coatcheck.workers.runner.grammar_compiler import GrammarCompiler
from coatcheck.workers.runner.host_transfer import Download, upload
from coatcheck.workers.runner.kv_memory import layer_caches
from coatcheck.workers.runner.launched_step import DeviceStep, LogprobReport
from coatcheck.workers.runner.sampler import Sampler
from coatcheck.workers.runner.token_bitmask import TokenBitmasks
from coatcheck.workers.runner.warm_up import kernel_plans
from coatcheck.workers.structured.grammar_backend import GrammarBackend

_LOGITS_ROWS = 64  # prompt logprobs take the vocabulary times this many floats at a time


class ModelRunner:
    """One rank's model, pool and mirror; `copier` where there is a host tier, `communicator` where there are other
    ranks, so that all know which grammars all have. `capture_sizes`: of cuda_graphs.py."""

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
        capture_sizes: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.pool = pool
        self.steps = 0
        self._copier = copier
        self._layout = layout
        self._kv = layer_caches(layout, pool)
        self._device = pool.device
        max_blocks = -(-max_model_len // layout.block_size)
        self._tokens = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=self._device)
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=self._device)
        self.graphs = CudaGraphs(
            model, self._kv, self._tokens, self._tables,
            block_size=layout.block_size, sizes=capture_sizes, most_tokens=len(pool) * layout.block_size,
        )  # fmt: skip
        self._sampler = Sampler(max_num_seqs, self._device)
        grammars = grammars or GrammarBackend(None, "this runner was given no grammars")
        self._press = GrammarCompiler(grammars, communicator or Communicator())
        self._masks = TokenBitmasks(grammars, model.spec.vocab_size, self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Carries out a plan; on a GPU the kernels are queued when this returns."""
        self.steps += 1
        self._press.start(plan)
        if self._copier is not None:
            self._copier.start(plan)
        step = self._compute(plan)
        if self._copier is not None:
            step.copies = self._copier.report()
        step.num_compiled = self._press.report()
        return step

    @torch.inference_mode()
    def warm(self) -> None:
        """Launches every kernel that serving can ask for, then captures the graphs; all ranks together, before any
        other plan. What it leaves in the pool and the mirror nobody has named yet."""
        vocab, size = self.model.spec.vocab_size, self._layout.block_size
        room = min(self._tokens.shape[1] - 1, len(self.pool) * size)
        groups = {layer.num_heads // layer.num_kv_heads for layer in self.model.spec.layers}
        lengths = sorted({length for group in groups for length in chunk_lengths(group)})
        for plan in kernel_plans(
            chunk_lengths=lengths, room=room, num_blocks=len(self.pool), block_size=size
        ):  # fmt: skip
            self.launch(plan).wait()
        logits, mask = torch.zeros(1, vocab, device=self._device), [[-1] * -(-vocab // 32)]
        apply_token_mask(logits, self._int64([0]), self._int32(mask))
        self.graphs.capture()

    def wait_for_copies(self) -> None:
        """Waits until no copy between the tiers is under way on any rank; for all ranks together, between plans."""
        while self._copier is not None and self._copier.report() is not None:
            pass

    def _compute(self, plan: StepPlan) -> DeviceStep:
        self._update_mirror(plan)
        self._copy_blocks(plan.copies)
        if not plan.rows:
            return DeviceStep(0, [], None)
        scores_prompt = any(self._sampler.scores_prompt(row.slot, row.start) for row in plan.rows)
        if not scores_prompt and (size := self.graphs.pick(plan.rows)) is not None:
            return self._sample(plan.rows, self.graphs.logits(plan.rows, size), {})
        wanted = None if scores_prompt else self._wanted(plan.rows)
        hidden = self._forward(plan.rows, wanted)
        if not any(row.sample for row in plan.rows) and not scores_prompt:
            return DeviceStep(len(plan.rows), [], None)
        if not scores_prompt:
            return self._sample(plan.rows, self.model.logits(hidden), {})
        ends = list(accumulate(row.num_tokens for row in plan.rows))
        reports = self._prompt_logprobs(plan.rows, ends, hidden)
        last = [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row.sample]
        if not last:
            return DeviceStep(len(plan.rows), [], None, prompt_logprobs=reports)
        return self._sample(plan.rows, self.model.logits(hidden[self._int64(last)]), reports)

    def _update_mirror(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._tokens[new.slot, : len(new.token_ids)] = self._int32(new.token_ids)
            self._sampler.set(new)
            self._masks.set(new)
        if plan.table_writes:
            triples = self._int32([(write.slot, write.index, write.block) for write in plan.table_writes]).T
            # Of two writes to one entry the later must win, which an indexed store does not promise.
            latest = {(write.slot, write.index): i for i, write in enumerate(plan.table_writes)}
            if len(latest) < len(plan.table_writes):
                triples = triples[:, self._int64(list(latest.values()))]
            self._tables[triples[0].long(), triples[1].long()] = triples[2]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        # Copies of one plan may chain (a block freed by one is the target of the next): then one by one, in order.
        sources, targets = [pair[0] for pair in copies], [pair[1] for pair in copies]
        chained = len({*sources, *targets}) < len(copies) + len(set(sources))
        for batch in [[pair] for pair in copies] if chained else [copies] if copies else []:
            pairs = self._int64(batch).T.contiguous()
            copy_blocks(self.pool, pairs[0], pairs[1])

    def _wanted(self, rows: list[Row]) -> LogitsIndices | None:
        """The tokens that are sampled after; None when that is every token, as when all rows decode."""
        if all(row.sample and row.num_tokens == 1 for row in rows):
            return None
        ends = accumulate(row.num_tokens for row in rows)
        tokens = [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample]
        counts = accumulate((int(row.sample) for row in rows), initial=0)
        return LogitsIndices(self._int64(tokens), self._int32(list(counts)))

    def _forward(self, rows: list[Row], wanted: LogitsIndices | None) -> Tensor:
        """Hidden states [T, hidden] of every token of the rows, or [R, hidden] of those wanted."""
        lens = [row.num_tokens for row in rows]
        cu = list(accumulate(lens, initial=0))
        longest = max(lens)
        slots, starts, counts = self._int64([(row.slot, row.start, row.num_tokens) for row in rows]).T
        seq_lens = starts + counts
        if longest == 1:
            token_slots, positions = slots, starts
        else:
            row_of = torch.arange(len(rows), device=self._device).repeat_interleave(counts, output_size=cu[-1])
            token_slots = slots[row_of]
            positions = torch.arange(cu[-1], device=self._device) + (starts - self._int64(cu[:-1]))[row_of]
        size = self._layout.block_size
        max_seq_len = max(row.start + row.num_tokens for row in rows)
        blocks = self._tables[token_slots, positions // size]
        metadata = AttentionMetadata(
            slot_mapping=blocks.long() * size + positions % size,
            block_tables=self._tables[slots, : -(-max_seq_len // size)],
            seq_lens=seq_lens.to(torch.int32),
            cu_seqlens_q=self._int32(cu),
            max_seqlen_q=longest,
            max_seq_len=max_seq_len,
            batch_invariant=self.model.deterministic,
            total_seq_len=sum(row.start + row.num_tokens for row in rows),
            num_prefills=sum(row.num_tokens > 1 for row in rows),
        )
        ids = self._tokens[token_slots, positions].long()
        return self.model.forward(ids, positions, metadata, self._kv, wanted)

    def _sample(self, rows: list[Row], logits: Tensor, prompt_logprobs: dict[int, list[LogprobReport]]) -> DeviceStep:
        """Draws after each row that samples; `logits` [R, vocab], which it changes, are those of their last tokens."""
        sampled = [index for index, row in enumerate(rows) if row.sample]
        slots = [rows[index].slot for index in sampled]
        positions = [rows[index].start + rows[index].num_tokens for index in sampled]
        counts = {r: count for r, slot in enumerate(slots) if (count := self._sampler.wants_logprobs(slot)) is not None}
        reported = self._int64(list(counts))
        raw = logits[reported] if counts else logits
        failed = self._constrain(logits, slots)
        token_ids = self._sampler.draw(logits, slots, positions, self._tokens)
        self._tokens[self._int64(slots), self._int64(positions)] = token_ids.to(torch.int32)
        arriving = Download.start(token_ids)
        self._masks.drew(slots, arriving)
        logprobs = None
        if counts:
            report = LogprobReport.start(raw, token_ids[reported], list(counts.values()))
            logprobs = [sampled[r] for r in counts], report
        said = {sampled[r]: reason for r, reason in failed.items()}
        return DeviceStep(len(rows), sampled, arriving, logprobs, prompt_logprobs, failed=said)

    def _constrain(self, logits: Tensor, slots: list[int]) -> dict[int, str]:
        """Leaves each row the tokens that its structured output can go on with; returns why a row has none."""
        masks = self._masks.masks(slots)
        if masks is None:
            return {}
        rows, bits, failed = masks
        apply_token_mask(logits, self._int64(rows), bits)
        return failed

    def _prompt_logprobs(self, rows: list[Row], ends: list[int], hidden: Tensor) -> dict[int, list[LogprobReport]]:
        reports: dict[int, list[LogprobReport]] = {}
        for index, row in enumerate(rows):
            count = self._sampler.wants_prompt_logprobs(row.slot)
            # The hidden state at position p speaks of token p + 1, which must be the prompt's.
            known = min(row.start + row.num_tokens, self._sampler.prompt_len(row.slot) - 1) - row.start
            if count is None or known < 1:
                continue
            first = ends[index] - row.num_tokens
            reports[index] = []
            for at in range(0, known, _LOGITS_ROWS):
                n = min(_LOGITS_ROWS, known - at)
                logits = self.model.logits(hidden[first + at : first + at + n])
                said = self._tokens[row.slot, row.start + at + 1 : row.start + at + 1 + n].long()
                reports[index].append(LogprobReport.start(logits, said, [count] * n))
        return reports

    def _int32(self, values: object) -> Tensor:
        return upload(values, torch.int32, self._device)

    def _int64(self, values: object) -> Tensor:
        return upload(values, torch.int64, self._device)
