"""KVCacheManager: the device's block pool, the host pool, and the copies between them.

    evicted from the device -> its KV stays in the block -> demoted before the block is written, or earlier if a step
    has time for it
    found in the host pool -> a device block is allocated -> queued -> restored by a plan -> reported by every rank

A restore holds a reference to its device block, so the block stays allocated even if the sequence ends meanwhile. The
manager decides which plan contains which copies. The ranks copy.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypedDict

from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason, PrefixMiss, Tier
from coatcheck.workers.core.copy_report import CopyReport, CopyStatus
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.copy_cost import CopyCost
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import create_policy
from coatcheck.workers.kv.host_pool import HostPool, HostPoolStats
from coatcheck.workers.kv.prefix_registry import PrefixRegistry, choose_max_ghosts

# Every 31st copy that costs too much is made nonetheless. Otherwise a cost measured in a bad moment would never change,
# because no copy would be measured again.
_TRIAL_EVERY: Final = 31


@dataclass(slots=True, eq=False)
class _Restore:
    """A copy from a host slot to a device block. `sequence`: has the block at `index` of its block table; None once the
    sequence has given the block up."""

    sequence: Sequence | None
    index: int
    slot: int
    block: int


class KVCacheStats(TypedDict):
    """The fields of EngineStats that KVCacheManager fills."""

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
    """`host`: None without a host tier."""

    def __init__(self, pool: BlockPool, host: HostPool | None, block_size: int) -> None:
        self.pool = pool
        self.host = host
        self.registry = pool.registry
        self.copy_cost = CopyCost(block_size)
        self._queued: deque[_Restore] = deque()
        self._in_progress: list[int | _Restore] = []  # in the order of the ranks' reports; an int is a demotion's slot
        self._num_rejected: Counter[str] = Counter()  # copies that cost too much, by direction
        self._corrupt_at: dict[Sequence, int] = {}  # index of the first corrupt block of a restoring sequence

    @property
    def has_copies(self) -> bool:
        """Whether copies are queued, in progress, or would be made in another step."""
        to_demote = self.host is not None and self.pool.oldest_evicted_block() is not None
        return bool(self._queued or self._in_progress or to_demote)

    def find_cached_blocks(self, hashes: Iterable[bytes], *, with_decodes: bool) -> list[int | None]:
        """The leading blocks of a prompt that need not be computed: device blocks, None for one to restore."""
        found: list[int | None] = []
        num_on_host, first_on_host = 0, -1
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                if self.host is None or block_hash not in self.host:
                    break
                first_on_host = len(found) if first_on_host < 0 else first_on_host
                num_on_host += 1
            found.append(block)
        if num_on_host and not self.copy_cost.is_restore_faster(
            num_on_host, num_queued=len(self._queued), with_decodes=with_decodes
        ):
            return found[: first_on_host + self._is_trial("restore")]  # a trial restores one block
        return found

    def requeue_blocks(self, hashes: list[bytes]) -> None:
        """Apply the changed retention claims of this chain now, even if the request that changed them waits."""
        for block_hash in reversed(hashes):
            self.pool.requeue_block(block_hash)
            if self.host is not None and block_hash in self.host:
                self.host.requeue_block(block_hash)

    def explain_miss(self, block_hash: bytes, index: int) -> PrefixMiss:
        """Why `find_cached_blocks` ended before this block."""
        if self.host is not None and block_hash in self.host:
            return PrefixMiss(index, MissReason.RECOMPUTED)
        return self.pool.registry.explain_miss(block_hash, index)

    def queue_restore(self, sequence: Sequence, index: int) -> None:
        """Queue the copy of block `index` from the host pool to the sequence's device block."""
        assert self.host is not None
        slot = self.host.begin_restore(sequence.block_hashes[index])
        self._queued.append(_Restore(sequence, index, slot, sequence.block_table[index]))
        sequence.num_restoring += 1

    def demote_evicted_prefix(self, block: int, plan: StepPlan) -> None:
        """Before the plan writes to `block`, demote the evicted prefix whose KV is still there, if worthwhile."""
        prefix = self.pool.pop_evicted_prefix(block)
        if prefix is None or self.host is None:
            return
        if prefix.block_hash in self.host:
            self.host.requeue_block(prefix.block_hash)
            return
        is_worthwhile = self.copy_cost.is_demotion_worthwhile or self._is_trial("demote")
        if is_worthwhile and (slot := self.host.begin_demotion(prefix)) is not None:
            plan.demotes.append((block, slot))

    def plan_copies(self, plan: StepPlan, *, with_decodes: bool) -> None:
        """Add as many queued restores, then demotions, as the step has time for. Call this last for each plan."""
        if self.host is None:
            return
        max_blocks = self.copy_cost.max_blocks_per_step(with_decodes=with_decodes)
        left = max(max_blocks - len(plan.demotes), 1)
        restores = []
        while left > 0 and self._queued:
            restore = self._queued.popleft()
            before = len(plan.demotes)
            self.demote_evicted_prefix(restore.block, plan)
            left -= 1 + len(plan.demotes) - before
            self.pool.share_blocks([restore.block])
            plan.restores.append((restore.slot, restore.block))
            restores.append(restore)
        while left > 0 and (block := self.pool.oldest_evicted_block()) is not None:
            self.demote_evicted_prefix(block, plan)
            left -= 1
        self._in_progress += [slot for _, slot in plan.demotes]
        self._in_progress += restores

    def record_copies(self, report: CopyReport) -> list[tuple[Sequence, int | None]]:
        """Take the ranks' report on the oldest copies in progress.

        Return the sequences whose last restore has ended, each with the index of its first corrupt block, or None.
        """
        ended: list[tuple[Sequence, int | None]] = []
        unfinished: list[int | _Restore] = []
        num_reported = len(report.statuses)
        reported, not_reported = self._in_progress[:num_reported], self._in_progress[num_reported:]
        for copy, status in zip(reported, report.statuses, strict=True):
            if status is CopyStatus.IN_PROGRESS:
                unfinished.append(copy)
            elif isinstance(copy, int):
                assert self.host is not None
                self.host.end_demotion(copy)
            elif (sequence := self._end_restore(copy, is_intact=status is CopyStatus.DONE)) is not None:
                ended.append((sequence, self._corrupt_at.pop(sequence, None)))
        self._in_progress = [*unfinished, *not_reported]
        return ended

    def cancel_restores(self, sequence: Sequence) -> None:
        """Drop the queued restores of a sequence that gives up its blocks. Those in progress run to their end."""
        if not sequence.num_restoring:
            return
        assert self.host is not None
        for restore in self._queued:
            if restore.sequence is sequence:
                self.host.end_restore(restore.slot, is_intact=None)
        self._queued = deque(restore for restore in self._queued if restore.sequence is not sequence)
        for copy in self._in_progress:
            if isinstance(copy, _Restore) and copy.sequence is sequence:
                copy.sequence = None
        self._corrupt_at.pop(sequence, None)
        sequence.num_restoring = 0

    def preemption_cost(self, sequence: Sequence) -> float:
        """Seconds to get back the blocks that only `sequence` holds; their number of tokens if nothing is measured."""
        num_shared = sum(self.pool.is_shared(block) for block in sequence.block_table)
        num_tokens = max(sequence.num_scheduled - num_shared * self.copy_cost.block_size, 0)
        if self.host is None or not self.copy_cost.prefill:
            return float(num_tokens)
        return self.copy_cost.recovery_seconds(num_tokens)

    def update_copy_cost(self, copies: CopyReport | None, *, tokens_per_second: float, step_seconds: float) -> None:
        """Record how fast ranks copy, prefill and decode. `copies`: None without a new measurement."""
        if self.host is not None:
            self.copy_cost = self.copy_cost.updated(copies, tokens_per_second=tokens_per_second, step=step_seconds)

    def stats(self) -> KVCacheStats:
        host = self.host.stats() if self.host is not None else HostPoolStats()
        return KVCacheStats(
            host_blocks_total=host.total,
            host_blocks_used=host.held,
            demotions=host.demotions,
            restores=host.restores,
            integrity_failures=host.integrity_failures,
            device_evictions=self.pool.stats().evictions,
            host_evictions=host.evictions,
            demote_seconds=self.copy_cost.demote,
            restore_seconds=self.copy_cost.restore,
        )

    def drain_events(self) -> list[KvEvent]:
        """The events of both tiers since the last call, in order within a tier."""
        return self.pool.drain_events() + (self.host.drain_events() if self.host is not None else [])

    def snapshot(self) -> list[KvEvent]:
        """A stored event for each prefix block in either tier."""
        return self.pool.snapshot() + (self.host.snapshot() if self.host is not None else [])

    def check(self) -> list[list[int]]:
        """Raise AssertionError on a broken invariant. Return the device blocks that restores hold."""
        in_progress = [copy for copy in self._in_progress if isinstance(copy, _Restore)]
        num_restoring: Counter[Sequence] = Counter()
        for restore in (*self._queued, *in_progress):
            if restore.sequence is not None:
                num_restoring[restore.sequence] += 1
                assert restore.sequence.block_table[restore.index] == restore.block, "restored into another's block"
        for sequence, count in num_restoring.items():
            assert sequence.num_restoring == count, "a restore is lost or counted twice"
        assert all(restore.sequence is not None for restore in self._queued), "a queued restore has no sequence"
        assert self._corrupt_at.keys() <= num_restoring.keys(), "a sequence with a corrupt block restores nothing"
        if self.host is not None:
            self.host.check()
        return [[restore.block] for restore in in_progress]

    def _is_trial(self, direction: str) -> bool:
        self._num_rejected[direction] += 1
        return self._num_rejected[direction] % _TRIAL_EVERY == 0

    def _end_restore(self, restore: _Restore, *, is_intact: bool) -> Sequence | None:
        """Return the restore's sequence if this was its last one."""
        assert self.host is not None
        self.host.end_restore(restore.slot, is_intact=is_intact)
        self.pool.release_blocks([restore.block])
        sequence = restore.sequence
        if sequence is None:
            return None
        if not is_intact:
            self._corrupt_at[sequence] = min(restore.index, self._corrupt_at.get(sequence, restore.index))
        sequence.num_restoring -= 1
        return None if sequence.num_restoring else sequence


def build_kv_cache(
    num_blocks: int, host_blocks: int, block_size: int, eviction: str, attention_crossover: int
) -> KVCacheManager:
    """An empty cache of two tiers, or of one if `host_blocks` is 0.

    `eviction`: "cost" or "lru". `attention_crossover`: in tokens, see `ModelSpec`.
    """
    registry = PrefixRegistry(choose_max_ghosts(num_blocks + host_blocks))
    crossover = attention_crossover / block_size
    # Each tier has a policy of its own; the reuse rates that both use are shared.
    device_policy = create_policy(eviction, registry.reuse_table, crossover)
    pool = BlockPool(num_blocks, Evictor(registry, device_policy, num_blocks, Tier.DEVICE))
    host = None
    if host_blocks:
        host_policy = create_policy(eviction, registry.reuse_table, crossover)
        host = HostPool(host_blocks, Evictor(registry, host_policy, host_blocks, Tier.HOST))
    return KVCacheManager(pool, host, block_size)
