"""Scheduler: which tokens of which sequences the next step computes. Pure: no tensor, no I/O, no clock.

Continuous batching under a token budget. Each step takes, in this order:

1. the next token of every running sequence that decodes,
2. the next chunk of running prompts,
3. waiting sequences, by priority and then in order of arrival,
4. draft tokens (drafter.py), if there are no prompts to compute.

A cached prefix is not computed again. Blocks that only the host tier holds are restored if that is faster than
computing them. During its restores a sequence holds its slot and blocks but is in no plan. A sequence waits while
another sequence computes the next block that both need.

A prompt of a model with recurrent states starts at a snapshot of the states. A chunk ends where a snapshot is to be
saved.

When blocks run out, a sequence is preempted: it gives up its slot and blocks and waits again. A sequence preempts only
sequences that come after it by priority and arrival, so the first sequence in that order always finishes.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from coatcheck.workers.core.request import Pooling
from coatcheck.workers.core.runner_protocol import CopyReport
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import DraftToken, NewSequence, ScheduledSequence, StepPlan, TableWrite
from coatcheck.workers.engine.drafter import Drafter
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager

_SMALLEST_CHUNK: Final = 16  # tokens; a smaller chunk costs little more than the overhead of its step
_BY_SORT_KEY: Final = attrgetter("sort_key")


@dataclass(frozen=True, slots=True)
class _CachedPrefix:
    """The part of a waiting sequence that need not be computed. `blocks`: its leading device blocks; None for a block
    that must be restored from the host. `num_tokens`: their tokens that count as computed."""

    blocks: list[int | None]
    num_tokens: int
    is_forked: bool  # the blocks are those of `prompt_source`; the last may also hold tokens of its output


@dataclass(slots=True)
class _TokenBudget:
    """How many prompt tokens one step may still compute. `left`: in tokens. `crossover`: see Scheduler.

    If the step has decodes, a chunk also pays for its attention over the tokens before it, so that the last chunk of a
    long prompt delays the decodes no longer than the first chunk:

        price(start, count) = count * (1 + (start + count / 2) / crossover)

    In a step without decodes, price(start, count) = count.
    """

    left: float
    crossover: int
    with_decodes: bool

    @property
    def is_spent(self) -> bool:
        return self.left < 1

    def take_tokens(self, start: int, wanted: int) -> int:
        """Return how many of `wanted` tokens from position `start` this step computes, and charge for them."""
        affordable = self.left
        if self.with_decodes:
            affordable = min(max(self.left / (1 + start / self.crossover), _SMALLEST_CHUNK), self.left)
        count = min(wanted, int(affordable))
        self.left -= count * (1 + (start + count / 2) / self.crossover) if self.with_decodes else count
        return count


class Scheduler:
    """Owns the sequences' slots and the blocks of `kv_cache`. `waiting` and `running` are sorted by `sort_key`.

    `attention_crossover`: the context length in tokens at which attention takes as long as the linears.
    `drafter`: None for no draft tokens. It needs an engine that does not plan a step before it knows the tokens of the
    step before, and a model without recurrent states.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        attention_crossover: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.pool = kv_cache.pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._block_size = kv_cache.block_size
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self._attention_crossover = attention_crossover
        self._drafter = drafter
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._unsent_writes: list[TableWrite] = []  # for the next plan
        self._num_steps = 0

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence, which must fit in the pool if it runs alone."""
        insort(self.waiting, sequence, key=_BY_SORT_KEY)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step's plan, and the sequences of its `scheduled`, in the same order."""
        plan = StepPlan(self._num_steps)
        self._num_steps += 1
        plan.table_writes, self._unsent_writes = self._unsent_writes, []
        scheduled: list[Sequence] = []
        self._plan_decodes(plan, scheduled)
        left = self._max_batch_tokens - len(scheduled)
        budget = _TokenBudget(left, self._attention_crossover, with_decodes=bool(scheduled))
        self._plan_prefills(plan, scheduled, budget)
        self._plan_admissions(plan, scheduled, budget)
        if self._drafter is not None and all(one.num_tokens == 1 and one.needs_sample for one in plan.scheduled):
            self._plan_drafts(self._drafter, plan, scheduled)
        self.kv_cache.plan_copies(plan, with_decodes=budget.with_decodes)
        if plan.is_idle:  # the engine may drop an idle plan
            self._unsent_writes, plan.table_writes = plan.table_writes, []
        return plan, scheduled

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove an ended sequence from `running` or `waiting`, and free its slot and blocks."""
        sequence.is_finished = True
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._free_resources(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def register_blocks(self, sequence: Sequence) -> None:
        """Add the sequence's newly full blocks to the prefix cache. If another block already holds a prefix, the
        sequence switches to that block and frees its own."""
        size = self._block_size
        for index in range(sequence.num_registered, min(sequence.num_computed // size, len(sequence.block_hashes))):
            block_hash = sequence.block_hashes[index]
            parent = sequence.block_hashes[index - 1] if index else b""
            block = sequence.block_table[index]
            # A cached block that follows a restored one is registered already.
            known = self.pool.get_cached_block(block_hash)
            if known != block:
                known = self.pool.register_block(block, block_hash, parent, index, sequence.request.owner)
            if known != block:
                self.pool.share_blocks([known])
                self.pool.release_blocks([block])
                sequence.block_table[index] = known
                self._unsent_writes.append(TableWrite(sequence.slot, index, known))
            if self.kv_cache.states is not None:
                self.kv_cache.states.record_registered(sequence, index, block_hash)
            self.kv_cache.remove_pending(sequence, [block_hash])
            sequence.num_registered = index + 1

    def record_copies(self, report: CopyReport) -> None:
        """Apply the ranks' report on copies between the tiers. Sequences whose restores are all done can be planned;
        a sequence with a corrupt block waits again."""
        for sequence, corrupt_at in self.kv_cache.record_copies(report):
            if corrupt_at is None:
                sequence.num_computed = sequence.num_scheduled
                self.register_blocks(sequence)
                continue
            # The blocks before the corrupt one are registered, so that the next admission finds them.
            sequence.num_computed = corrupt_at * self._block_size
            self.register_blocks(sequence)
            sequence.cached_device_tokens = -1
            sequence.cached_host_tokens = min(sequence.cached_host_tokens, sequence.num_computed)
            self._requeue_sequence(sequence)

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or has one sequence, whose scheduled tokens have blocks."""
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "slots lost or doubled"
        for sequence in self.running:
            room = len(sequence.block_table) * self._block_size
            assert sequence.num_computed <= sequence.num_scheduled <= sequence.num_tokens, "progress out of order"
            assert sequence.num_scheduled <= room, "tokens without a block"
            assert not sequence.is_finished, "a finished sequence is running"
        for sequence in self.waiting:
            assert sequence.slot < 0 and not sequence.block_table, "a waiting sequence holds blocks"
        held = self.kv_cache.check(self.running)
        self.pool.check((*(sequence.block_table for sequence in self.running), *held))

    # Decodes and prefills of running sequences.

    def _plan_decodes(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        for sequence in list(self.running):
            # Restores that end together may leave more sequences to decode than max_batch_tokens.
            if len(scheduled) == self._max_batch_tokens:
                break
            # At max_len the token in flight ends the sequence, whatever its id. A slot below 0 means that this loop
            # has preempted the sequence for one before it.
            if sequence.slot < 0 or sequence.num_unscheduled != 1 or sequence.num_tokens >= sequence.max_len:
                continue
            if sequence.num_restoring:
                continue
            if self._preempt_for(sequence, plan):
                self._schedule_tokens(plan, sequence, 1)
                scheduled.append(sequence)

    def _plan_prefills(self, plan: StepPlan, scheduled: list[Sequence], budget: _TokenBudget) -> None:
        for sequence in self.running:
            if sequence.num_unscheduled > 1 and not sequence.num_restoring and not budget.is_spent:
                self._schedule_chunk(plan, sequence, budget)
                scheduled.append(sequence)

    def _schedule_chunk(self, plan: StepPlan, sequence: Sequence, budget: _TokenBudget) -> None:
        """Add as many of a prompt's tokens to the plan as the budget allows, up to the next snapshot point."""
        wanted = sequence.num_unscheduled
        if sequence.snapshot_points:
            wanted = sequence.snapshot_points[0] * self._block_size - sequence.num_scheduled
        self._schedule_tokens(plan, sequence, budget.take_tokens(sequence.num_scheduled, wanted))

    def _schedule_tokens(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Add the sequence's next `count` tokens to the plan. The caller makes sure that there are enough blocks."""
        start = sequence.num_scheduled
        self._prepare_blocks(plan, sequence, start, count)
        sequence.num_scheduled += count
        needs_sample = sequence.num_scheduled == sequence.num_tokens
        sequence.num_output_placeholders += int(needs_sample)
        plan.scheduled.append(ScheduledSequence(sequence.slot, start, count, needs_sample))
        self.kv_cache.plan_state_save(sequence, plan)

    def _plan_drafts(self, drafter: Drafter, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Add draft tokens of the scheduled sequences to a plan that only decodes. A draft token takes a row, and
        perhaps a free block, but never the place of a sequence."""
        max_rows = min(self._max_num_seqs, self._max_batch_tokens) - len(scheduled)
        for sequence, draft in zip(list(scheduled), drafter.draft(scheduled, max_rows), strict=True):
            start = sequence.num_scheduled
            room = len(sequence.block_table) + max(self.pool.num_available - len(self.running), 0)
            draft = draft[: room * self._block_size - start]
            if draft:
                self._prepare_blocks(plan, sequence, start, len(draft))
            for position, token_id in enumerate(draft, start):
                plan.drafts.append(DraftToken(sequence.slot, position, token_id))
                plan.scheduled.append(ScheduledSequence(sequence.slot, position, 1, needs_sample=True))
                scheduled.append(sequence)

    def _prepare_blocks(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> None:
        """Allocate missing blocks for the `count` tokens from position `start` on, and copy a shared block before it
        is written."""
        size = self._block_size
        for index in range(start // size, (start + count - 1) // size + 1):
            is_sent = index < len(sequence.block_table)  # whether the ranks' block table has this entry
            if not is_sent:
                sequence.block_table += self.pool.allocate_blocks(1)
            elif not self.pool.is_writable(shared := sequence.block_table[index]):
                (sequence.block_table[index],) = self.pool.allocate_blocks(1)
                plan.cow_copies.append((shared, sequence.block_table[index]))
                self.pool.release_blocks([shared])
                is_sent = False
            # The block may still hold the KV of an evicted prefix block. Demote that before this step overwrites it.
            self.kv_cache.demote_evicted_block(sequence.block_table[index], plan)
            if not is_sent:
                plan.table_writes.append(TableWrite(sequence.slot, index, sequence.block_table[index]))

    # Preemption.

    def _preempt_for(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt until there is a block for the next token of `sequence`. Return False if `sequence` itself had to be
        preempted."""
        while self._count_missing_blocks(sequence) > self.pool.num_available:
            victim = self._cheapest_victim(sequence)
            self._preempt_sequence(victim, plan)
            if victim is sequence:
                return False
        return True

    def _count_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks to allocate for the next token: 1 if the token starts a block or its block is not writable, else 0."""
        index = sequence.num_scheduled // self._block_size
        table = sequence.block_table
        return int(index == len(table) or not self.pool.is_writable(table[index]))

    def _cheapest_victim(self, sequence: Sequence) -> Sequence:
        """The cheapest sequence to preempt for `sequence`: of those after it in `running`, or `sequence` if there is
        none. Among equal costs the last."""
        later = [s for s in self.running if s.sort_key > sequence.sort_key]
        return max(later, key=lambda s: (-self.kv_cache.preemption_cost(s), s.sort_key), default=sequence)

    def _preempt_sequence(self, victim: Sequence, plan: StepPlan) -> None:
        # Decodes are planned in the order of `running`, and a victim comes later. So this plan has no token of it yet.
        plan.table_writes = [write for write in plan.table_writes if write.slot != victim.slot]
        self._requeue_sequence(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue_sequence(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_resources(sequence)
        sequence.num_computed = sequence.num_scheduled = sequence.num_registered = 0
        self.add_sequence(sequence)

    def _free_resources(self, sequence: Sequence) -> None:
        self._unsent_writes = [write for write in self._unsent_writes if write.slot != sequence.slot]
        self.kv_cache.remove_pending(sequence, sequence.block_hashes[sequence.num_registered :])
        self.kv_cache.cancel_restores(sequence)
        self.kv_cache.end_state_saves(sequence)
        self.pool.release_blocks(sequence.block_table)
        sequence.block_table = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    # Admission of waiting sequences.

    def _plan_admissions(self, plan: StepPlan, scheduled: list[Sequence], budget: _TokenBudget) -> None:
        skipped: list[Sequence] = []
        while self.waiting and self._free_slots and not budget.is_spent:
            sequence = self.waiting.popleft()
            if self._waits_for_another(sequence, with_decodes=budget.with_decodes):
                skipped.append(sequence)
            elif self._admit_sequence(sequence, plan, with_decodes=budget.with_decodes):
                if sequence.num_restoring:
                    continue
                self._schedule_chunk(plan, sequence, budget)
                scheduled.append(sequence)
            else:  # no later sequence overtakes this one, even if it needs less room
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(skipped))

    def _waits_for_another(self, sequence: Sequence, *, with_decodes: bool) -> bool:
        """Whether a token, a prompt or a prefix block that `sequence` needs is being computed."""
        if sequence.num_output_placeholders:
            return True
        source = sequence.prompt_source
        if source is not None and not source.is_finished:
            # Waiting for the prompt is cheaper than computing it twice. A resumed source that still prefills would
            # write to its last prompt block after that block is shared.
            return source.num_computed < source.prompt_len or source.num_unscheduled > 1 or source.num_restoring > 0
        return self.kv_cache.is_prefix_pending(sequence, with_decodes=with_decodes)

    def _admit_sequence(self, sequence: Sequence, plan: StepPlan, *, with_decodes: bool) -> bool:
        """Give the sequence a slot and blocks for all its tokens. Return False if there is not enough room."""
        prefix = self._find_prefix(sequence, with_decodes=with_decodes)
        cached = [block for block in prefix.blocks if block is not None]
        num_new_blocks = self._count_blocks(len(sequence.token_ids)) - len(cached)
        num_unused = sum(self.pool.is_unused(block) for block in cached)
        # Keep a spare block for each running sequence, and one for a fork, which copies its last block.
        num_spare = len(self.running) + int(prefix.is_forked) if self.running else 0
        if num_new_blocks + num_unused + num_spare > self.pool.num_available:
            return False
        self.pool.share_blocks(cached)
        new_blocks = iter(self.pool.allocate_blocks(num_new_blocks))
        table = [next(new_blocks) if block is None else block for block in prefix.blocks]
        sequence.block_table = [*table, *new_blocks]
        sequence.num_computed = sequence.num_scheduled = prefix.num_tokens
        sequence.num_registered = prefix.num_tokens // self._block_size
        self._queue_restores(sequence, prefix.blocks)
        missing = None if prefix.is_forked else len(prefix.blocks)
        self.kv_cache.record_cached_tokens(sequence, prefix.num_tokens, missing)
        sequence.slot = self._free_slots.pop()
        self.kv_cache.plan_state_restore(sequence, len(prefix.blocks), plan)
        self.kv_cache.set_snapshot_points(sequence, len(prefix.blocks))
        self.kv_cache.add_pending(sequence)
        insort(self.running, sequence, key=_BY_SORT_KEY)
        sampling = sequence.request.sampling
        stops = tuple(sorted(sequence.end_token_ids)) if sampling.min_tokens else ()
        ids = list(sequence.token_ids)
        pooling = Pooling.NONE if sequence.choice or sequence.has_sent_output else sequence.request.pooling
        new = NewSequence(
            sequence.slot, sequence.choice, sequence.prompt_len, ids, sampling, stops, pooling=pooling,
            adapter=sequence.adapter,
        )  # fmt: skip
        plan.new_sequences.append(new)
        plan.table_writes.extend(TableWrite(sequence.slot, i, block) for i, block in enumerate(sequence.block_table))
        return True

    def _find_prefix(self, sequence: Sequence, *, with_decodes: bool) -> _CachedPrefix:
        """The prompt blocks of the sequence's running `prompt_source`, or else the cached blocks of both tiers.

        A model with states always takes cached blocks: the `prompt_source` has the states after its last token, no
        longer those at the end of its prompt."""
        source = sequence.prompt_source
        if source is not None and source.slot >= 0 and not source.is_finished and self.kv_cache.states is None:
            shared = source.block_table[: self._count_blocks(sequence.prompt_len)]
            return _CachedPrefix([*shared], sequence.prompt_len - 1, is_forked=True)
        found = self.kv_cache.find_cached_blocks(sequence, with_decodes=with_decodes)
        return _CachedPrefix(found, len(found) * self._block_size, is_forked=False)

    def _queue_restores(self, sequence: Sequence, prefix_blocks: list[int | None]) -> None:
        """Queue the restores of the blocks that only the host tier holds. Until all are done, only the tokens before
        the first such block count as computed."""
        if None not in prefix_blocks:
            return
        sequence.num_registered = prefix_blocks.index(None)
        sequence.num_computed = sequence.num_registered * self._block_size
        for index, block in enumerate(prefix_blocks):
            if block is None:
                self.kv_cache.queue_restore(sequence, index)

    def _count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
