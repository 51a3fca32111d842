"""Which block stays, or is evicted first, because requests asked for it."""

import pytest

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import EvictionReason
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import RETAINED_SHARE
from tests.workers.kv.pool_visit import chain_of, make_evictor, serve


@pytest.mark.parametrize("order", ["lru", "cost"])
def test_a_retained_prompt_stays_until_its_time_is_over(order: str) -> None:
    """A prompt retained for 60 seconds stays through a flood of the same tenant for that time, and no longer."""
    pool = BlockPool(40, make_evictor(order, 40))
    kept = chain_of("kept", 8)
    serve(pool, kept, retention=Retention(50, 60.0))
    for number in range(100):
        pool.registry.advance_clock(number * 0.5)
        serve(pool, chain_of(f"flood {number} ", 4))
    assert all(pool.get_cached_block(block_hash) is not None for block_hash in kept)
    pool.registry.advance_clock(61.0)
    for number in range(100):
        serve(pool, chain_of(f"late {number} ", 4))
    assert pool.get_cached_block(kept[0]) is None


def test_a_retention_asked_for_anew_outlasts_the_first() -> None:
    """A prompt that is retained again while its blocks are evictable stays for the longer time."""
    pool = BlockPool(40, make_evictor("cost", 40))
    kept = chain_of("kept", 8)
    serve(pool, kept, retention=Retention(50, 60.0))
    pool.registry.advance_clock(30.0)
    pool.registry.record_request(kept, "", Retention(50, 600.0))
    for number in range(100):
        pool.registry.advance_clock(61.0 + number)
        serve(pool, chain_of(f"flood {number} ", 4))
    assert all(pool.get_cached_block(block_hash) is not None for block_hash in kept)
    pool.registry.advance_clock(631.0)
    for number in range(100):
        serve(pool, chain_of(f"late {number} ", 4))
    assert pool.get_cached_block(kept[0]) is None


def test_an_expired_retention_outlasts_no_other() -> None:
    """A block whose retention of high priority has expired is evicted before a block that is still retained."""
    pool = BlockPool(8, make_evictor("lru", 8))
    serve(pool, chain_of("short", 1), retention=Retention(80, 10.0))
    serve(pool, chain_of("long", 1), retention=Retention(40, 1000.0))
    serve(pool, chain_of("other", 6))
    pool.registry.advance_clock(9.5)
    serve(pool, chain_of("new", 1))
    pool.registry.advance_clock(10.1)
    pool.allocate_blocks(7)  # the six blocks that were never retained, and one more
    assert pool.get_cached_block(b"short0") is None and pool.get_cached_block(b"long0") is not None
    assert EvictionReason.LAST_RESORT not in pool.evictor.num_evictions


@pytest.mark.parametrize("order", ["lru", "cost"])
def test_a_block_that_is_unwanted_once_its_retention_expires_can_be_evicted(order: str) -> None:
    """The last evictable block was retained, and another request said that it is unwanted: it is evicted as unwanted
    as soon as its retention has expired."""
    pool = BlockPool(8, make_evictor(order, 8))
    kept = chain_of("kept", 1)
    serve(pool, kept, retention=Retention(50, 10.0))
    pool.registry.record_request(kept, "", Retention(0, 600.0))
    serve(pool, chain_of("other", 1))
    pool.registry.advance_clock(9.5)
    pool.allocate_blocks(7)  # the free ones, and that of "other"
    pool.registry.advance_clock(10.1)
    pool.allocate_blocks(1)
    assert pool.evictor.num_evictions[EvictionReason.UNWANTED] == 1


def test_nobody_undoes_what_another_has_asked_for() -> None:
    """A retained prompt stays though another request says that it is unwanted. When the higher claim expires, a lower
    claim that lasts longer counts."""
    pool = BlockPool(40, make_evictor("lru", 40))
    shared = chain_of("shared", 5)
    for retention in (Retention(80, 100.0), Retention(40, 1000.0), Retention(0, 500.0), None):
        serve(pool, shared, retention=retention)
    rival = chain_of("rival", 10)
    for now, priority in ((50.0, 60), (150.0, 60)):
        pool.registry.advance_clock(now)
        serve(pool, rival, retention=Retention(priority, 20.0))
        for number in range(30):
            serve(pool, chain_of(f"flood {now} {number} ", 5))
        # Together more than the cap: which of them gives way says whose claim is the higher.
        kept = [sum(pool.get_cached_block(block_hash) is not None for block_hash in chain) for chain in (shared, rival)]
        assert kept == ([5, 5] if now < 100 else [0, 10])


@pytest.mark.parametrize("later", [None, Retention(10, 1.0)])
def test_what_is_asked_for_after_all_is_not_unwanted(later: Retention | None) -> None:
    """An unwanted prompt is an ordinary one again once another request has asked for it."""
    pool = BlockPool(12, make_evictor("lru", 12))
    shared, other = chain_of("shared", 5), chain_of("other", 5)
    serve(pool, other)
    serve(pool, shared, retention=Retention(0))
    serve(pool, shared, retention=later)
    pool.registry.advance_clock(2.0)
    serve(pool, chain_of("new", 5))
    assert pool.get_cached_block(shared[4]) is not None and pool.get_cached_block(other[4]) is None


@pytest.mark.parametrize("order", ["lru", "cost"])
def test_of_retained_prompts_the_lowest_priority_goes_beyond_the_cap(order: str) -> None:
    """Beyond the limit only the highest priorities are retained. The others count as ordinary blocks."""
    capacity = 40
    pool = BlockPool(capacity, make_evictor(order, capacity))
    prompts = [chain_of(f"kept {priority} ", 5) for priority in (10, 90, 20, 80, 30, 40)]
    for chain, priority in zip(prompts, (10, 90, 20, 80, 30, 40), strict=True):
        serve(pool, chain, retention=Retention(priority, 1000.0))
    for number in range(50):
        serve(pool, chain_of(f"flood {number} ", 5))
    there = [sum(pool.get_cached_block(block_hash) is not None for block_hash in chain) for chain in prompts]
    assert there == [0, 5, 0, 5, 0, 0]
    assert sum(there) == capacity * RETAINED_SHARE


def test_what_is_not_wanted_again_goes_first() -> None:
    """A prompt of priority 0 is evicted before older ones."""
    pool = BlockPool(12, make_evictor("cost", 12))
    old, discarded = chain_of("old", 6), chain_of("discarded", 6)
    serve(pool, old)
    serve(pool, discarded, retention=Retention(0))
    serve(pool, chain_of("new", 6))
    assert pool.get_cached_block(old[5]) is not None
    assert pool.get_cached_block(discarded[0]) is None
    assert pool.evictor.num_evictions == {EvictionReason.UNWANTED: 6}
