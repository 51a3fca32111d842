"""Scheduler: which tokens of which sequences the next step computes. Pure: no tensor, no I/O, no clock.

Continuous batching under a token budget: every running decode first, then the prefills under way, then admission by
priority and in order of arrival. A long prompt is computed in chunks beside the decodes; while there are decodes, a
chunk is priced with its attention over what came before it, so that the thousandth chunk of a long prompt stalls them
no more than the first. A prefix that the host tier holds is restored where that is sooner than computing it; its
sequence has its slot and blocks meanwhile, and joins the plans when they are filled. Preemption never takes a sequence
that goes before the one that needs room, so the first always ends. The scheduler owns the tiers and the slots. It does
not know models, ranks or who asked.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import StepPlan, TableWrite
from coatcheck.workers.engine.row_planner import RowPlanner
from coatcheck.workers.engine.token_budget import TokenBudget
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager
from coatcheck.workers.kv.prefix_lookup import PrefixLookup


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`attention_crossover`: the context length at which attention costs as much per token as all else (tokens)."""

    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    attention_crossover: int = 4096


class Scheduler:
    """`waiting` and `running` are in order of arrival."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, host: HostPool | None = None) -> None:
        self.config = config
        self.pool = pool
        self.tiers = KVCacheManager(pool, host, config.block_size)
        self._rows = RowPlanner(pool, self.tiers, config.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._prefixes = PrefixLookup(self.tiers, config.block_size)
        self._merged: list[TableWrite] = []
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; whoever calls has checked that the pool can hold it alone."""
        if self.waiting and self.waiting[-1].arrival > sequence.arrival:
            self._insert_waiting(sequence)
        else:
            self.waiting.append(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step's plan, and the sequence of each of its rows."""
        plan = StepPlan(self._steps)
        self._steps += 1
        plan.table_writes, self._merged = self._merged, []
        scheduled: list[Sequence] = []
        self._plan_decodes(plan, scheduled)
        left = self.config.max_batch_tokens - len(scheduled)
        budget = TokenBudget(left, self.config.attention_crossover, beside_decodes=bool(scheduled))
        self._plan_prefills(plan, scheduled, budget)
        self._plan_admissions(plan, scheduled, budget)
        self.tiers.plan_copies(plan, beside_decodes=budget.beside_decodes)
        if plan.is_idle:  # such a plan may never be sent
            self._merged, plan.table_writes = plan.table_writes, []
        return plan, scheduled

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its blocks; results in flight will be dropped."""
        sequence.gone = True
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def register(self, sequence: Sequence) -> None:
        """Names the sequence's newly full blocks; a block whose prefix another one holds is given up for it."""
        size = self.config.block_size
        for index in range(sequence.num_registered, min(sequence.num_computed // size, len(sequence.block_hashes))):
            block_hash = sequence.block_hashes[index]
            parent = sequence.block_hashes[index - 1] if index else b""
            block = sequence.block_table[index]
            # Known already if the block was found in the cache behind one that had to be restored.
            known = self.pool.get_cached_block(block_hash)
            if known != block:
                known = self.pool.register_block(block, block_hash, parent, index, sequence.request.owner)
            if known != block:
                self.pool.share_blocks([known])
                self.pool.release_blocks([block])
                sequence.block_table[index] = known
                self._merged.append(TableWrite(sequence.slot, index, known))
            self._prefixes.remove_pending(sequence, [block_hash])
            sequence.num_registered = index + 1

    def settle(self, report: CopyReport) -> None:
        """Takes the ranks' report on copies between the tiers; sequences whose blocks have all come may be planned."""
        for sequence, broken_at in self.tiers.record_copies(report):
            if broken_at is None:
                sequence.num_computed = sequence.num_scheduled
                self.register(sequence)
                continue
            # What came back right is named, so that the next admission finds it; the rest is computed.
            sequence.num_computed = broken_at * self.config.block_size
            self.register(sequence)
            sequence.cached_device_tokens = -1
            sequence.cached_host_tokens = min(sequence.cached_host_tokens, sequence.num_computed)
            self._requeue(sequence)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant, the pool's included."""
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "slots lost or doubled"
        for sequence in self.running:
            room = len(sequence.block_table) * self.config.block_size
            assert sequence.num_computed <= sequence.num_scheduled <= sequence.num_tokens, "progress out of order"
            assert sequence.num_scheduled <= room, "tokens without a block"
            assert not sequence.gone, "a sequence that is gone still runs"
        for sequence in self.waiting:
            assert sequence.slot < 0 and not sequence.block_table, "a waiting sequence holds blocks"
        held = self.tiers.check()
        self.pool.check((*(sequence.block_table for sequence in self.running), *held))

    def _plan_decodes(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        for sequence in list(self.running):
            # At max_len everything is planned: the token in flight will end it, whichever it is. A slot below 0 is
            # a victim of an older sequence's need, a moment ago.
            if sequence.slot < 0 or sequence.num_uncomputed != 1 or sequence.num_tokens >= sequence.max_len:
                continue
            if sequence.num_restoring:
                continue
            if self._make_room(sequence, plan):
                self._rows.plan(plan, sequence, 1)
                scheduled.append(sequence)

    def _plan_prefills(self, plan: StepPlan, scheduled: list[Sequence], budget: TokenBudget) -> None:
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and not sequence.num_restoring and not budget.is_spent:
                count = budget.take(sequence.num_scheduled, sequence.num_uncomputed)
                self._rows.plan(plan, sequence, count)
                scheduled.append(sequence)

    def _plan_admissions(self, plan: StepPlan, scheduled: list[Sequence], budget: TokenBudget) -> None:
        passed_over: list[Sequence] = []
        while self.waiting and self._free_slots and not budget.is_spent:
            sequence = self.waiting.popleft()
            if self._waits_for_another(sequence, beside_decodes=budget.beside_decodes):
                passed_over.append(sequence)
            elif self._admit(sequence, plan, beside_decodes=budget.beside_decodes):
                if sequence.num_restoring:
                    continue
                count = budget.take(sequence.num_scheduled, sequence.num_uncomputed)
                self._rows.plan(plan, sequence, count)
                scheduled.append(sequence)
            else:  # in order of arrival: nobody overtakes one that needs more room
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(passed_over))

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether the sequence's next token has, or can get, a block that it may write."""
        while self._rows.blocks_wanted(sequence) > self.pool.num_available:
            victim = self._cheapest_victim(sequence)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _cheapest_victim(self, needy: Sequence) -> Sequence:
        """The younger sequence whose blocks are had back cheapest; the needy one itself if none is younger."""
        younger = [s for s in self.running if s.arrival > needy.arrival]
        return min(younger, key=lambda s: (self.tiers.preemption_cost(s), _backwards(s.arrival)), default=needy)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        # Decodes are planned oldest first and victims are younger, so a victim has no row in this plan yet.
        plan.table_writes = [write for write in plan.table_writes if write.slot != victim.slot]
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.num_computed = sequence.num_scheduled = sequence.num_registered = 0
        self._insert_waiting(sequence)

    def _insert_waiting(self, sequence: Sequence) -> None:
        at = sum(1 for _ in takewhile(lambda other: other.arrival < sequence.arrival, self.waiting))
        self.waiting.insert(at, sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._merged = [write for write in self._merged if write.slot != sequence.slot]
        self._prefixes.remove_pending(sequence, sequence.block_hashes[sequence.num_registered :])
        self.tiers.cancel_restores(sequence)
        self.pool.release_blocks(sequence.block_table)
        sequence.block_table = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _waits_for_another(self, sequence: Sequence, *, beside_decodes: bool) -> bool:
        """Whether what it needs is being computed right now: its own last token, its leader's prompt, its prefix."""
        leader = sequence.leader
        if sequence.num_pending:
            return True
        if leader is not None and not leader.gone:
            # Before the leader runs, and while its prompt is computed, waiting is cheaper than computing it twice.
            # A leader that still prefills (it was resumed) must not find its last block shared under its hands.
            return leader.num_computed < leader.prompt_len or leader.num_uncomputed > 1 or leader.num_restoring > 0
        return self._prefixes.is_prefix_pending(sequence, beside_decodes=beside_decodes)

    def _admit(self, sequence: Sequence, plan: StepPlan, *, beside_decodes: bool) -> bool:
        """Gives the sequence a slot and blocks for all its tokens, if there are so many beside what runs."""
        size = self.config.block_size
        forked = sequence.leader is not None and sequence.leader.slot >= 0 and not sequence.leader.gone
        found: list[int | None] = []
        if forked:
            assert sequence.leader is not None
            found += sequence.leader.block_table[: -(-sequence.prompt_len // size)]
            computed = sequence.prompt_len - 1
        else:
            found = self._prefixes.find_cached_blocks(sequence, beside_decodes=beside_decodes)
            computed = len(found) * size
        shared = [block for block in found if block is not None]
        fresh = -(-len(sequence.token_ids) // size) - len(shared)
        spare = len(self.running) + int(forked)  # one block each that decodes may need next, one to copy on write
        woken = sum(self.pool.is_unused(block) for block in shared)
        if fresh + woken + (spare if self.running else 0) > self.pool.num_available:
            return False
        self.pool.share_blocks(shared)
        taken = iter(self.pool.allocate_blocks(fresh))
        table = [next(taken) if block is None else block for block in found]
        sequence.block_table = [*table, *taken]
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = sequence.num_scheduled = computed
        sequence.num_registered = computed // size
        if None in found:
            sequence.num_registered = found.index(None)
            sequence.num_computed = sequence.num_registered * size
        for index, block in enumerate(found):
            if block is None:
                self.tiers.queue_restore(sequence, index)
        self._prefixes.record_cached_tokens(sequence, computed, None if forked else len(found))
        self._prefixes.add_pending(
            sequence, sequence.block_hashes[sequence.num_registered : self._prefixes.count_cacheable_blocks(sequence)]
        )
        self._insert_running(sequence)
        self._rows.announce(sequence, plan)
        return True

    def _insert_running(self, sequence: Sequence) -> None:
        at = len(self.running)
        while at and self.running[at - 1].arrival > sequence.arrival:
            at -= 1
        self.running.insert(at, sequence)


def _backwards(arrival: tuple[int, int]) -> tuple[int, int]:
    return -arrival[0], -arrival[1]
