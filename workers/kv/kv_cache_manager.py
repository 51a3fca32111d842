"""KVCacheManager: the device's block pool, the host pool, and the copies between them.

A prefix block's way to the host and back:

    demotion   evicted from the device pool -> its KV stays in the device block -> demoted before a step writes to the
               device block, or earlier if a step has time for it
    restore    found in the host pool -> device block allocated -> queued -> in a plan -> reported by every rank

A restore in progress holds a reference to its device block, so the block stays allocated even if its sequence ends.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from coatcheck.proto.snapshot_points import MIN_SNAPSHOT_TOKENS, choose_snapshot_points
from coatcheck.workers.core.cache_reasons import MissReason, PrefixMiss, Tier
from coatcheck.workers.core.runner_protocol import CopyReport, CopyStatus
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.cache_snapshot import CacheSnapshot
from coatcheck.workers.kv.copy_cost import CopyCost, CopyTrials
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import CandidateHeap, create_policy
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.prefix_registry import PrefixRegistry, choose_max_ghosts
from coatcheck.workers.kv.state_snapshots import StateSnapshots

# A save is two kernels for each layer with a state, so many sequences that end a block together would make one step
# long. A sequence that is left out tries again at the end of its next block.
_MAX_ROLLING_SAVES_PER_STEP: Final = 4


@dataclass(slots=True, eq=False)
class _Restore:
    """A copy from a host block to a device block. `sequence`: the sequence with `block` at `index` of its block table;
    None once it has given up the block."""

    sequence: Sequence | None
    index: int
    host_block: int
    block: int


class KVCacheManager:
    """`host`: has no blocks if there is no host tier. `pool.states`: None unless the model keeps states. A model with
    states has no host tier, and starts a prompt only after a cached block with a snapshot.

    A block is *pending* while a running sequence is going to compute or restore it. Another sequence that needs the
    block waits instead of computing it twice.
    """

    def __init__(self, pool: BlockPool, host: HostPool, block_size: int) -> None:
        assert not (pool.states is not None and host.num_blocks), "a model that keeps states has no host tier"
        self.pool = pool
        self.host = host
        self.states = pool.states
        self.registry = pool.registry
        self.block_size = block_size
        self.copy_cost = CopyCost(block_size)
        self._pending: dict[bytes, Sequence] = {}  # by block hash
        self._queued: deque[_Restore] = deque()
        # In the order of the ranks' reports; an int is a demotion's host block.
        self._in_progress: list[int | _Restore] = []
        self._demotion_trials, self._restore_trials = CopyTrials(), CopyTrials()
        self._corrupt_at: dict[Sequence, int] = {}  # index of the first corrupt block of a restoring sequence

    @property
    def has_copies(self) -> bool:
        """Whether copies are queued, in progress, or would be made in another step."""
        to_demote = self.host.num_blocks and self.pool.oldest_evicted_block() is not None
        return bool(self._queued or self._in_progress or to_demote)

    # Which blocks of a prompt are cached.

    def count_cacheable_blocks(self, sequence: Sequence) -> int:
        """The number of leading full blocks that may come from the cache. At least one token must be computed, because
        the next token needs its logits."""
        return min(len(sequence.block_hashes), (len(sequence.token_ids) - 1) // self.block_size)

    def find_cached_blocks(self, sequence: Sequence, *, with_decodes: bool) -> list[int | None]:
        """The leading blocks that need not be computed: their device blocks; None for a block to restore."""
        if sequence.computes_whole_prompt:
            return []
        found: list[int | None] = []
        for block_hash in sequence.block_hashes[: self.count_cacheable_blocks(sequence)]:
            block = self.pool.get_cached_block(block_hash)
            if block is None and block_hash not in self.host:
                break
            found.append(block)
        if self.states is not None:
            return found[: self.states.count_restorable_blocks(sequence.block_hashes[: len(found)])]
        num_on_host = found.count(None)
        if num_on_host and not self.copy_cost.is_restore_faster(
            num_on_host, num_queued=len(self._queued), with_decodes=with_decodes
        ):
            return found[: found.index(None) + int(self._restore_trials.is_due)]  # a trial restores one block
        return found

    def is_prefix_pending(self, sequence: Sequence, *, with_decodes: bool) -> bool:
        """Whether another sequence computes or restores the next block that `sequence` needs."""
        if sequence.computes_whole_prompt:
            return False
        if sequence.awaited_hash in self._pending:
            return True
        if not self._pending:
            return False
        found = self.find_cached_blocks(sequence, with_decodes=with_decodes)
        if self.states is not None:
            later = sequence.block_hashes[len(found) : self.count_cacheable_blocks(sequence)]
            sequence.awaited_hash = next((block_hash for block_hash in later if block_hash in self._pending), b"")
            return bool(sequence.awaited_hash)
        # The next block to compute, and the first block to restore.
        needed = {len(found), found.index(None) if None in found else len(found)}
        for index in needed - {self.count_cacheable_blocks(sequence)}:
            if sequence.block_hashes[index] in self._pending:
                sequence.awaited_hash = sequence.block_hashes[index]
                return True
        return False

    def add_pending(self, sequence: Sequence) -> None:
        """Mark the blocks that an admitted sequence will register as pending, unless they are pending already. With
        states only the blocks where it saves a snapshot: other sequences can start only there."""
        if self.states is not None:
            hashes = [sequence.block_hashes[count - 1] for count in sequence.snapshot_points]
        else:
            hashes = sequence.block_hashes[sequence.num_registered : self.count_cacheable_blocks(sequence)]
        for block_hash in hashes:
            self._pending.setdefault(block_hash, sequence)

    def remove_pending(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """Unmark blocks that `sequence` has registered or given up, unless another sequence marked them."""
        for block_hash in hashes:
            if self._pending.get(block_hash) is sequence:
                del self._pending[block_hash]

    def record_cached_tokens(self, sequence: Sequence, num_cached: int, missing: int | None) -> None:
        """At admission, record in `sequence` how many prompt tokens were cached, and why block `missing` was not.

        `num_cached`: tokens that need not be computed. `missing`: the index of the first block that was not found; None
        if the cache was not searched. A restore of `missing` counts as rejected: earlier searches for the same sequence
        do not count. A later admission changes nothing else, unless a restore found a corrupt block since.
        """
        num_cacheable = 0 if sequence.computes_whole_prompt else self.count_cacheable_blocks(sequence)
        missing_hash = sequence.block_hashes[missing] if missing is not None and missing < num_cacheable else b""
        if missing_hash in self.host and not sequence.num_restoring:
            self._restore_trials.count_rejected()
        if sequence.cached_device_tokens >= 0:
            return
        if missing is not None and missing_hash and missing < sequence.prompt_len // self.block_size:
            if missing_hash in self.host:
                sequence.miss = PrefixMiss(missing, MissReason.RECOMPUTED)
            elif self.states is not None and self.pool.get_cached_block(missing_hash) is not None:
                sequence.miss = PrefixMiss(missing, MissReason.NO_SNAPSHOT)
            else:
                sequence.miss = self.registry.explain_miss(missing_hash, missing)
        cached = min(num_cached, sequence.prompt_len)
        sequence.cached_host_tokens += sequence.num_restoring * self.block_size
        sequence.cached_host_tokens = min(sequence.cached_host_tokens, cached)
        sequence.cached_device_tokens = cached - sequence.cached_host_tokens

    def requeue_blocks(self, hashes: list[bytes]) -> None:
        """Queue the blocks of this chain for eviction again, because a request has changed their retention claims. The
        claims then count even while the request waits."""
        for block_hash in reversed(hashes):
            self.pool.requeue_block(block_hash)
            if block_hash in self.host:
                self.host.requeue_block(block_hash)
            if self.states is not None:
                self.states.requeue_block(block_hash)

    def reset_prefix_cache(self) -> None:
        """Evict the prefix blocks of both tiers that no sequence and no copy uses."""
        self.pool.evict_unused_blocks()
        self.host.evict_unused_blocks()

    # Snapshots of states.

    def plan_state_restore(self, sequence: Sequence, num_cached: int, plan: StepPlan) -> None:
        """At admission, restore the states after the sequence's first `num_cached` blocks."""
        if self.states is not None and num_cached:
            slot = self.states.plan_restore(sequence.block_hashes[num_cached - 1])
            plan.state_restores.append((slot, sequence.slot))

    def set_snapshot_points(self, sequence: Sequence, num_cached: int) -> None:
        """At admission, choose after which blocks the sequence saves its states. `num_cached`: its leading blocks that
        need not be computed."""
        if self.states is None:
            return
        sequence.last_snapshot = num_cached
        hashes = sequence.block_hashes
        points = choose_snapshot_points(
            num_cached,
            self._count_blocks_on_device(hashes),
            prompt_len=sequence.prompt_len,
            num_tokens=len(sequence.token_ids),
            block_size=self.block_size,
            num_choices=sequence.request.sampling.n,
        )
        # A prompt that is computed whole leaves out the points whose snapshot is held already. The points in an answer
        # whose blocks are not computed yet have no hash.
        sequence.snapshot_points = [p for p in points if p <= len(hashes) and hashes[p - 1] not in self.states]

    def plan_state_save(self, sequence: Sequence, plan: StepPlan) -> None:
        """Save the sequence's states after the plan's step, if its scheduled tokens end where a snapshot is due."""
        num_blocks, rest = divmod(sequence.num_scheduled, self.block_size)
        if self.states is None or rest:
            return
        slot = None
        if sequence.snapshot_points:
            if num_blocks == sequence.snapshot_points[0]:
                slot = self.states.plan_prompt_save(sequence, sequence.snapshot_points.pop(0) - 1)
        elif self._is_rolling_save_due(sequence, num_blocks, plan):
            slot = self.states.plan_rolling_save(sequence, num_blocks - 1)
        if slot is not None:
            sequence.last_snapshot = num_blocks
            plan.state_saves.append((sequence.slot, slot))

    def end_state_saves(self, sequence: Sequence) -> None:
        """Plan no more snapshots of a sequence that gives up its blocks (see StateSnapshots.end_sequence)."""
        sequence.snapshot_points = []
        if self.states is not None:
            self.states.end_sequence(sequence)

    def _is_rolling_save_due(self, sequence: Sequence, num_blocks: int, plan: StepPlan) -> bool:
        """Whether to replace the rolling snapshot of a sequence that decodes. With the snapshot neither the next turn
        of the chat nor a preemption computes its answer again."""
        decodes = sequence.num_output_placeholders > 0 and sequence.num_scheduled > sequence.prompt_len
        num_new_tokens = (num_blocks - sequence.last_snapshot) * self.block_size
        return decodes and num_new_tokens >= MIN_SNAPSHOT_TOKENS and len(plan.state_saves) < _MAX_ROLLING_SAVES_PER_STEP

    def _count_blocks_on_device(self, hashes: list[bytes]) -> int:
        """The number of leading blocks of the chain `hashes` whose KV is on the device."""
        missing = (index for index, block in enumerate(hashes) if self.pool.get_cached_block(block) is None)
        return next(missing, len(hashes))

    # Copies between the tiers.

    def queue_restore(self, sequence: Sequence, index: int) -> None:
        """Queue the copy of block `index` from the host pool to the sequence's device block."""
        host_block = self.host.begin_restore(sequence.block_hashes[index])
        self._queued.append(_Restore(sequence, index, host_block, sequence.block_table[index]))
        sequence.num_restoring += 1
        self._restore_trials.count_copy()

    def demote_evicted_block(self, block: int, plan: StepPlan) -> None:
        """Demote the evicted prefix block whose KV is still in `block`, if copying pays. Call this before the plan
        writes to `block`."""
        prefix = self.pool.pop_evicted_block(block)
        if prefix is None or not self.host.num_blocks:
            return
        if prefix.block_hash in self.host:
            self.host.requeue_block(prefix.block_hash)
            return
        if not (self.copy_cost.is_demotion_worthwhile or self._demotion_trials.is_due):
            self._demotion_trials.count_rejected()
        elif (host_block := self.host.begin_demotion(prefix)) is not None:
            self._demotion_trials.count_copy()
            plan.demotes.append((block, host_block))

    def plan_copies(self, plan: StepPlan, *, with_decodes: bool) -> None:
        """Add as many queued restores, and then demotions, as the step has time for; at least one copy if there is one.
        Call this last for each plan."""
        if not self.host.num_blocks:
            return
        left = max(self.copy_cost.max_blocks_per_step(with_decodes=with_decodes) - len(plan.demotes), 1)
        restores = []
        while left > 0 and self._queued:
            restore = self._queued.popleft()
            before = len(plan.demotes)
            self.demote_evicted_block(restore.block, plan)
            left -= 1 + len(plan.demotes) - before
            self.pool.share_blocks([restore.block])
            plan.restores.append((restore.host_block, restore.block))
            restores.append(restore)
        while left > 0 and (block := self.pool.oldest_evicted_block()) is not None:
            self.demote_evicted_block(block, plan)
            left -= 1
        self._in_progress += [*(host_block for _, host_block in plan.demotes), *restores]

    def record_copies(self, report: CopyReport) -> list[tuple[Sequence, int | None]]:
        """Apply the ranks' report on the oldest copies in progress.

        Return the sequences whose last restore has ended, each with the index of its first corrupt block, or None.
        """
        ended: list[tuple[Sequence, int | None]] = []
        unfinished: list[int | _Restore] = []
        num_reported = len(report.statuses)
        for copy, status in zip(self._in_progress[:num_reported], report.statuses, strict=True):
            if status is CopyStatus.IN_PROGRESS:
                unfinished.append(copy)
            elif isinstance(copy, int):
                self.host.end_demotion(copy)
            elif (sequence := self._end_restore(copy, is_intact=status is CopyStatus.DONE)) is not None:
                ended.append((sequence, self._corrupt_at.pop(sequence, None)))
        self._in_progress[:num_reported] = unfinished
        return ended

    def cancel_restores(self, sequence: Sequence) -> None:
        """Drop the queued restores of a sequence that gives up its blocks. Those in progress run to their end."""
        if not sequence.num_restoring:
            return
        for restore in self._queued:
            if restore.sequence is sequence:
                self.host.end_restore(restore.host_block, is_intact=None)
        self._queued = deque(restore for restore in self._queued if restore.sequence is not sequence)
        for copy in self._in_progress:
            if isinstance(copy, _Restore) and copy.sequence is sequence:
                copy.sequence = None
        self._corrupt_at.pop(sequence, None)
        sequence.num_restoring = 0

    def preemption_cost(self, sequence: Sequence) -> float:
        """The cost of getting the blocks back that only `sequence` holds: seconds with a host tier and a measured
        prefill rate, otherwise their number of tokens."""
        num_shared = sum(self.pool.is_shared(block) for block in sequence.block_table)
        num_tokens = max(sequence.num_scheduled - num_shared * self.copy_cost.block_size, 0)
        if not self.host.num_blocks or not self.copy_cost.prefill:
            return float(num_tokens)
        return self.copy_cost.recovery_seconds(num_tokens)

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call: of the device pool, then of the other tier, in order within each."""
        other = self.host if self.states is None else self.states
        return self.pool.drain_events() + other.drain_events()

    def begin_snapshot(self) -> CacheSnapshot:
        """The prefix blocks of both tiers, and the snapshots of states, to be read in chunks."""
        return CacheSnapshot(self.pool, self.host, *([] if self.states is None else [self.states]))

    def check(self, running: Iterable[Sequence] = ()) -> list[list[int]]:
        """Raises AssertionError unless sequences, restores, pending blocks and snapshots agree. Returns the device
        block of each restore in progress, as a list of one. `running`: all running sequences."""
        running = {*running}
        assert {*self._pending.values()} <= running, "a block is pending by a sequence that does not run"
        for sequence in running:
            registered = sequence.block_hashes[: sequence.num_registered]
            assert all(self._pending.get(one) is not sequence for one in registered), "a registered block is pending"
            points = sequence.snapshot_points
            assert points == sorted({*points}), "snapshot points out of order"
            assert not points or points[0] * self.block_size > sequence.num_scheduled, "a snapshot point was passed"
        if self.states is not None:
            self.states.check(running)
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
        self.host.check()
        return [[restore.block] for restore in in_progress]

    def _end_restore(self, restore: _Restore, *, is_intact: bool) -> Sequence | None:
        """Return the restore's sequence if this was its last one."""
        self.host.end_restore(restore.host_block, is_intact=is_intact)
        self.pool.release_blocks([restore.block])
        sequence = restore.sequence
        if sequence is None:
            return None
        if not is_intact:
            self._corrupt_at[sequence] = min(restore.index, self._corrupt_at.get(sequence, restore.index))
        sequence.num_restoring -= 1
        return None if sequence.num_restoring else sequence


def build_kv_cache(
    num_blocks: int,
    host_blocks: int,
    block_size: int,
    eviction: str,
    attention_crossover: int,
    snapshot_slots: range = range(0),
) -> KVCacheManager:
    """An empty cache of two tiers, or of one if `host_blocks` is 0.

    `eviction`: "cost" or "lru". `attention_crossover`: in tokens, see `ModelSpec`. `snapshot_slots`: see
    StateSnapshots; empty for a model without states.
    """
    registry = PrefixRegistry(choose_max_ghosts(num_blocks + host_blocks))

    def make_evictor(capacity: int, tier: Tier) -> Evictor:
        # Each tier has its own policy. The policies share the reuse rates.
        policy = create_policy(eviction, registry.reuse_table, attention_crossover / block_size)
        return Evictor(registry, policy, capacity, tier)

    states = None
    if snapshot_slots:  # the least recently used snapshot is evicted first
        evictor = Evictor(registry, CandidateHeap(), len(snapshot_slots), Tier.STATE)
        states = StateSnapshots(snapshot_slots, evictor)
    pool = BlockPool(num_blocks, make_evictor(num_blocks, Tier.DEVICE), states)
    return KVCacheManager(pool, HostPool(host_blocks, make_evictor(host_blocks, Tier.HOST)), block_size)
