"""KVCacheManager: the device's pool, the host tier, and the copies planned and under way between them.

    evicted from the device -> leftover -> demoted by the first plan that would write over it, or by one with time
    found in host memory -> a device block for it, queued -> restored by a plan -> settled on every rank -> computed on

A device block that a restore writes to is held by that restore, so that nobody else takes it meanwhile, whatever
becomes of the sequence. It decides what to copy and in which plan; it does not copy, and knows no tensor or clock.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason, PrefixMiss
from coatcheck.workers.core.copy_report import CopyReport, CopyStatus
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.copy_cost import CopyCost
from coatcheck.workers.kv.host_pool import HostPool, HostPoolStats

# Of the blocks that prices speak against copying, so many-th are copied nonetheless: a price that was measured in a bad
# moment would else never be measured again.
_TRIAL_EVERY: Final = 31


@dataclass(slots=True, eq=False)
class _Restore:
    """One block on its way back; `sequence` is None when nobody waits for it any more."""

    sequence: Sequence | None
    index: int
    slot: int
    block: int


class TierStats(TypedDict):
    """The part of EngineStats that is counted here."""

    host_blocks_total: int
    host_blocks_used: int
    demotions: int
    restores: int
    integrity_failures: int
    device_evictions: Mapping[EvictionReason, int]
    host_evictions: Mapping[EvictionReason, int]
    demote_seconds: float
    restore_seconds: float


class KVCacheManager:
    """`host` is None where there is no host tier: then blocks that are evicted are gone."""

    def __init__(self, pool: BlockPool, host: HostPool | None, block_size: int) -> None:
        self.pool = pool
        self.host = host
        self.prices = CopyCost(block_size)
        self._queue: deque[_Restore] = deque()
        self._under_way: list[int | _Restore] = []  # as ranks report on them; of a demotion the slot
        self._refused: Counter[str] = Counter()  # copies that the prices spoke against, by direction
        self._broken_at: dict[Sequence, int] = {}  # the first block of a restoring sequence that came back wrong

    @property
    def has_copies(self) -> bool:
        """Whether copies are planned, under way, or would be made if there were a step."""
        leftovers = self.host is not None and self.pool.first_leftover() is not None
        return bool(self._queue or self._under_way or leftovers)

    def find(self, hashes: Iterable[bytes], *, beside_decodes: bool) -> list[int | None]:
        """The leading blocks that can be had without computing: device blocks, None where the host alone has one."""
        found: list[int | None] = []
        on_host, without_host = 0, -1
        for block_hash in hashes:
            block = self.pool.lookup(block_hash)
            if block is None:
                if self.host is None or block_hash not in self.host:
                    break
                without_host = len(found) if without_host < 0 else without_host
                on_host += 1
            found.append(block)
        if on_host and not self.prices.restores(on_host, queued=len(self._queue), beside_decodes=beside_decodes):
            return found[: without_host + self._is_tried_again("restore")]  # one block tells the price as well
        return found

    def touch(self, hashes: list[bytes]) -> None:
        """A request has said how dearly it wants this chain kept: that counts from now on, also while it waits."""
        for block_hash in reversed(hashes):
            self.pool.touch(block_hash)
            if self.host is not None and block_hash in self.host:
                self.host.touch(block_hash)

    def explain(self, block_hash: bytes, index: int) -> PrefixMiss:
        """Why `find` ended before this block."""
        if self.host is not None and block_hash in self.host:
            return PrefixMiss(index, MissReason.RECOMPUTED)
        return self.pool.book.explain(block_hash, index)

    def restore(self, sequence: Sequence, index: int) -> None:
        """Queues the restore of a sequence's block, which the host has, into the device block that it has for it."""
        assert self.host is not None
        slot = self.host.begin_restore(sequence.block_hashes[index])
        self._queue.append(_Restore(sequence, index, slot, sequence.block_table[index]))
        sequence.num_restoring += 1

    def before_write(self, block: int, plan: StepPlan) -> None:
        """The plan will write to this block: what an evicted prefix has left there is demoted, if it is worth it."""
        leftover = self.pool.take_leftover(block)
        if leftover is None or self.host is None:
            return
        if leftover.block_hash in self.host:
            self.host.touch(leftover.block_hash)
            return
        keeps = self.prices.keeps or self._is_tried_again("demote")
        if keeps and (slot := self.host.begin_demotion(leftover)) is not None:
            plan.demotes.append((block, slot))

    def plan_copies(self, plan: StepPlan, *, beside_decodes: bool) -> None:
        """Ends a plan: adds as many queued restores, and then leftovers, as the step has time for."""
        if self.host is None:
            return
        left = max(self.prices.blocks_per_step(beside_decodes=beside_decodes) - len(plan.demotes), 1)
        restores = []
        while left > 0 and self._queue:
            restore = self._queue.popleft()
            before = len(plan.demotes)
            self.before_write(restore.block, plan)
            left -= 1 + len(plan.demotes) - before
            self.pool.share([restore.block])
            plan.restores.append((restore.slot, restore.block))
            restores.append(restore)
        while left > 0 and (block := self.pool.first_leftover()) is not None:
            self.before_write(block, plan)
            left -= 1
        self._under_way += [slot for _, slot in plan.demotes]
        self._under_way += restores

    def settle(self, report: CopyReport) -> list[tuple[Sequence, int | None]]:
        """Takes what the ranks say of the copies longest under way. Returns the sequences whose last restore has ended,
        each with the index of its first block that came back wrong, if one did."""
        ended: list[tuple[Sequence, int | None]] = []
        still: list[int | _Restore] = []
        reported, self._under_way = self._under_way[: len(report.statuses)], self._under_way[len(report.statuses) :]
        for copy, status in zip(reported, report.statuses, strict=True):
            if status is CopyStatus.UNDER_WAY:
                still.append(copy)
            elif isinstance(copy, int):
                assert self.host is not None
                self.host.end_demotion(copy)
            elif (sequence := self._end(copy, intact=status is CopyStatus.DONE)) is not None:
                ended.append((sequence, self._broken_at.pop(sequence, None)))
        self._under_way = [*still, *self._under_way]
        return ended

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives its blocks up; what is under way to them ends by itself."""
        if not sequence.num_restoring:
            return
        assert self.host is not None
        for restore in self._queue:
            if restore.sequence is sequence:
                self.host.end_restore(restore.slot, intact=None)
        self._queue = deque(restore for restore in self._queue if restore.sequence is not sequence)
        for copy in self._under_way:
            if isinstance(copy, _Restore) and copy.sequence is sequence:
                copy.sequence = None
        self._broken_at.pop(sequence, None)
        sequence.num_restoring = 0

    def loss(self, sequence: Sequence) -> float:
        """What its preemption costs: seconds until what only it holds is back; tokens, if nothing is measured."""
        shared = sum(self.pool.is_shared(block) for block in sequence.block_table)
        own = max(sequence.num_scheduled - shared * self.prices.block_size, 0)
        return self.prices.loss(own) if self.host is not None and self.prices.prefill else float(own)

    def counts(self) -> TierStats:
        """Everything of the host tier, as EngineStats names it."""
        host = self.host.stats() if self.host is not None else HostPoolStats()
        return TierStats(
            host_blocks_total=host.total,
            host_blocks_used=host.held,
            demotions=host.demotions,
            restores=host.restores,
            integrity_failures=host.integrity_failures,
            device_evictions=self.pool.stats().evictions,
            host_evictions=host.evictions,
            demote_seconds=self.prices.demote,
            restore_seconds=self.prices.restore,
        )

    def drain_events(self) -> list[KvEvent]:
        """What was stored and removed in either tier since the last call; in order within a tier."""
        return self.pool.drain_events() + (self.host.drain_events() if self.host is not None else [])

    def snapshot(self) -> list[KvEvent]:
        """Every prefix block held in either tier."""
        return self.pool.snapshot() + (self.host.snapshot() if self.host is not None else [])

    def check(self) -> list[list[int]]:
        """Raises AssertionError on a broken invariant; returns the device blocks that restores hold."""
        under_way = [copy for copy in self._under_way if isinstance(copy, _Restore)]
        waiting: Counter[Sequence] = Counter()
        for restore in (*self._queue, *under_way):
            if restore.sequence is not None:
                waiting[restore.sequence] += 1
                assert restore.sequence.block_table[restore.index] == restore.block, "restored into another's block"
        for sequence, count in waiting.items():
            assert sequence.num_restoring == count, "a restore is lost or counted twice"
        assert all(restore.sequence is not None for restore in self._queue), "a restore that nobody waits for is queued"
        assert self._broken_at.keys() <= waiting.keys(), "a broken block is remembered for nobody"
        if self.host is not None:
            self.host.check()
        return [[restore.block] for restore in under_way]

    def _is_tried_again(self, direction: str) -> bool:
        self._refused[direction] += 1
        return self._refused[direction] % _TRIAL_EVERY == 0

    def _end(self, restore: _Restore, *, intact: bool) -> Sequence | None:
        """The restore's sequence, if it waits for no other."""
        assert self.host is not None
        self.host.end_restore(restore.slot, intact=intact)
        self.pool.release([restore.block])
        sequence = restore.sequence
        if sequence is None:
            return None
        if not intact:
            self._broken_at[sequence] = min(restore.index, self._broken_at.get(sequence, restore.index))
        sequence.num_restoring -= 1
        return None if sequence.num_restoring else sequence
