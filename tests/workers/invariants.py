"""Invariants of the engine, its scheduler and its KV pools. Each function raises AssertionError if one is broken."""

from collections import Counter
from collections.abc import Iterable

from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.scheduler import Scheduler
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager, Restore
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry
from coatcheck.workers.structured.grammar_registry import GrammarRegistry


def check_engine(engine: Engine) -> None:
    """Every live sequence is queued once, and all parts of the engine agree."""
    in_scheduler = (*engine.scheduler.waiting, *engine.scheduler.running)
    check_scheduler(engine.scheduler)
    check_grammars(engine._grammars, in_scheduler)
    known = {id(sequence) for choices in engine._sequences.values() for sequence in choices}
    queued = {id(sequence) for sequence in (*in_scheduler, *engine._grammars.waiting_sequences())}
    assert queued == known, "a sequence is lost or left behind"


def check_scheduler(scheduler: Scheduler) -> None:
    """Each slot is free or has one running sequence, whose scheduled tokens have blocks."""
    slots = [sequence.slot for sequence in scheduler.running]
    assert sorted(slots + scheduler._free_slots) == list(range(len(slots) + len(scheduler._free_slots))), "slots lost"
    for sequence in scheduler.running:
        room = len(sequence.block_table) * scheduler.kv_cache.block_size
        assert sequence.num_computed <= sequence.num_scheduled <= sequence.num_tokens, "progress out of order"
        assert sequence.num_scheduled <= room, "tokens without a block"
        assert not sequence.is_finished, "a finished sequence is running"
    for sequence in scheduler.waiting:
        assert sequence.slot < 0 and not sequence.block_table, "a waiting sequence holds blocks"
    held = check_kv_cache(scheduler.kv_cache)
    check_block_pool(scheduler.pool, (*(sequence.block_table for sequence in scheduler.running), *held))


def check_kv_cache(kv_cache: KVCacheManager) -> list[list[int]]:
    """Sequences and restores agree. Returns the device blocks that restores hold."""
    in_progress = [copy for copy in kv_cache._in_progress if isinstance(copy, Restore)]
    num_restoring: Counter[Sequence] = Counter()
    for restore in (*kv_cache._queued, *in_progress):
        if restore.sequence is not None:
            num_restoring[restore.sequence] += 1
            assert restore.sequence.block_table[restore.index] == restore.block, "restored into another's block"
    for sequence, count in num_restoring.items():
        assert sequence.num_restoring == count, "a restore is lost or counted twice"
    assert all(restore.sequence is not None for restore in kv_cache._queued), "a queued restore has no sequence"
    assert kv_cache._corrupt_at.keys() <= num_restoring.keys(), "a sequence with a corrupt block restores nothing"
    check_host_pool(kv_cache.host)
    return [[restore.block] for restore in in_progress]


def check_block_pool(pool: BlockPool, tables: Iterable[Iterable[int]]) -> None:
    """Every block is in one state, and has one reference for each place in `tables`."""
    holders = Counter(block for table in tables for block in table)
    free = set(pool._free)
    assert len(free) == len(pool._free), "a block is free twice"
    cached = {block: prefix for block, prefix in enumerate(pool._prefixes) if prefix and prefix in pool.evictor}
    check_evictor(pool.evictor, cached.values())
    for block, refs in enumerate(pool._ref_counts):
        prefix = pool._prefixes[block]
        assert refs == holders[block], f"block {block}: {refs} references, {holders[block]} holders"
        assert (refs == 0) == (block in free or block in cached), f"block {block}: {refs} references, wrong list"
        assert prefix is None or pool._by_hash[prefix.block_hash] == block, f"block {block}: found under no hash"
        assert not (block in free and prefix), f"block {block} is free and has a prefix"
        assert not (prefix and block in pool._evicted), f"block {block} holds two prefixes"
    assert len(pool._by_hash) == sum(prefix is not None for prefix in pool._prefixes), "a hash has no block"


def check_host_pool(host: HostPool) -> None:
    """Every slot is in one state."""
    free, evictable = set(host._free), set[int]()
    assert len(free) == len(host._free), "a slot is free twice"
    for slot, prefix in enumerate(host._prefixes):
        is_copied = bool(host._pins[slot]) or slot in host._demoting
        assert (slot in free) == (prefix is None and not is_copied), f"slot {slot} is free and in use, or lost"
        if prefix is not None:
            assert host._by_hash[prefix.block_hash] == slot, f"slot {slot}: found under no hash"
            assert (prefix in host.evictor) == (not is_copied), f"slot {slot}: the evictor is wrong about it"
            evictable |= set() if is_copied else {slot}
    assert len(evictable) == len(host.evictor), "the evictor has blocks that are not here"
    assert len(host._by_hash) == sum(prefix is not None for prefix in host._prefixes), "a hash has no slot"


def check_evictor(evictor: Evictor, evictable: Iterable[Prefix]) -> None:
    """Exactly the blocks `evictable` are in the evictor, and exactly the leaves are candidates."""
    expected = {prefix.block_hash: prefix for prefix in evictable}
    assert expected == {block_hash: block.prefix for block_hash, block in evictor._blocks.items()}, "other blocks"
    children = Counter(prefix.parent_hash for prefix in expected.values() if prefix.parent_hash)
    assert children == evictor._num_children, "children miscounted"
    candidates = {block_hash for block_hash, block in evictor._blocks.items() if not block.is_cancelled}
    assert candidates == expected.keys() - children.keys(), "a leaf is no candidate, or a block with children is one"
    tenants = Counter(prefix.tenant for prefix in expected.values())
    assert tenants == evictor._num_blocks_of, "tenants miscounted"
    assert evictor._claims.keys() <= expected.keys(), "a retained block is not here"


def check_registry(registry: PrefixRegistry) -> None:
    """Ghosts are bounded, and cohorts have the size that their blocks say."""
    assert len(registry._recent) <= registry.max_ghosts, "too many ghosts"
    assert all(registry._records[name] is record for name, record in registry._recent.items()), "two records"
    sizes = Counter(id(record.cohort) for record in registry._records.values() if record.cohort is not None)
    for record in registry._records.values():
        cohort = record.cohort
        assert cohort is None or cohort.size == sizes[id(cohort)], "a cohort's size is not its number of blocks"


def check_grammars(registry: GrammarRegistry, scheduled: Iterable[Sequence]) -> None:
    """Every grammar in use is ready or waited for. `scheduled`: the sequences that the scheduler holds."""
    in_scheduler = {sequence.request.sampling.structured for sequence in scheduled} - {None}
    assert in_scheduler <= registry._ready.keys(), "a scheduled sequence has a grammar that is not ready"
    assert len(set(registry._ids.values())) == len(registry._ids), "two grammars have one id"
    compiling = {grammar for queue in registry._compiling for grammar in queue}
    assert registry._ids.keys() == compiling | registry._ready.keys(), "a grammar has no id"
    assert not registry._ready.keys() & registry._waiting.keys(), "a sequence waits for a ready grammar"
    assert registry._failed <= registry._ready.keys(), "a failed grammar was dropped already"
    assert registry._uses.keys() <= registry._ready.keys() | registry._waiting.keys(), "a grammar in use is lost"
    for grammar, requests in registry._waiting.items():
        assert registry._uses[grammar] == sum(map(len, requests)), "uses are miscounted"
