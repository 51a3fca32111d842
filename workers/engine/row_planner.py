"""RowPlanner: a sequence's part of a plan: its slot's contents, the blocks that it writes to, its row.

It takes a block as a row comes to it, copies one that is shared before it is written, and lets the tiers save what was
left in it. Whoever calls has made sure that there is room. It does not know who goes first, nor the step's budget.
"""

from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import NewRow, Row, StepPlan, TableWrite
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager


class RowPlanner:
    """Over the pool and the tiers of one scheduler."""

    def __init__(self, pool: BlockPool, tiers: KVCacheManager, block_size: int) -> None:
        self._pool = pool
        self._tiers = tiers
        self._block_size = block_size

    def announce(self, sequence: Sequence, plan: StepPlan) -> None:
        """Ranks are told all that there is to know of a sequence that has just been given its slot."""
        sampling = sequence.request.sampling
        stops = tuple(sorted(sequence.end_token_ids)) if sampling.min_tokens else ()
        ids = list(sequence.token_ids)
        plan.new_rows.append(NewRow(sequence.slot, sequence.choice, sequence.prompt_len, ids, sampling, stops))
        plan.table_writes.extend(TableWrite(sequence.slot, i, block) for i, block in enumerate(sequence.block_table))

    def blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks to allocate before its next token is written: 1 if it starts a block or shares its last, else 0."""
        index = sequence.num_scheduled // self._block_size
        table = sequence.block_table
        return int(index == len(table) or not self._pool.is_writable(table[index]))

    def plan(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        """Its next `count` tokens."""
        size = self._block_size
        start = sequence.num_scheduled
        for index in range(start // size, (start + count - 1) // size + 1):
            known = index < len(sequence.block_table)
            if not known:
                sequence.block_table += self._pool.allocate_blocks(1)
            elif not self._pool.is_writable(shared := sequence.block_table[index]):
                (sequence.block_table[index],) = self._pool.allocate_blocks(1)
                plan.copies.append((shared, sequence.block_table[index]))
                self._pool.release_blocks([shared])
                known = False
            self._tiers.demote_before_write(sequence.block_table[index], plan)
            if known:
                continue
            plan.table_writes.append(TableWrite(sequence.slot, index, sequence.block_table[index]))
        sequence.num_scheduled += count
        sample = sequence.num_scheduled == sequence.num_tokens
        sequence.num_pending += int(sample)
        plan.rows.append(Row(sequence.slot, start, count, sample))
