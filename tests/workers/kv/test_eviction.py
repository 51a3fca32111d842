"""Which block is evicted next: by policy, by tenant, and by what requests asked to retain."""

import tracemalloc
from weakref import WeakKeyDictionary

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import EvictionReason
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import PROTECTION_SECONDS
from coatcheck.workers.kv.prefix_registry import PrefixBlock
from tests.examples import examples
from tests.workers.kv.pool_visit import chain_of, make_evictor, serve


class EvictionMachine(RuleBasedStateMachine):
    """Forking chains of three tenants come and go and are retained while time passes."""

    order, capacity = "cost", 12
    takes_what_it_finds = False  # if False, requests only ask for evictable blocks, as waiting ones do

    def __init__(self) -> None:
        super().__init__()
        self.evictor = make_evictor(self.order, self.capacity, ghosts=20)
        self.evictable: dict[bytes, PrefixBlock] = {}
        self.asked: WeakKeyDictionary[PrefixBlock, list[tuple[float, Retention | None]]] = WeakKeyDictionary()

    @rule(tenant=st.sampled_from("abc"), branch=st.integers(0, 2), length=st.integers(1, 6), data=st.data())
    def insert(self, tenant: str, branch: int, length: int, data: st.DataObject) -> None:
        chain = [f"{tenant}{depth if depth < 2 else (branch, depth)}".encode() for depth in range(length)]
        retention = data.draw(st.none() | st.builds(Retention, st.integers(0, 3), st.sampled_from([1.0, 50.0, 2000.0])))
        registry = self.evictor.registry
        registry.record_request(chain, tenant, retention)
        for depth in reversed(range(length)):
            record = registry.record_computed(chain[depth], chain[depth - 1] if depth else b"", depth, tenant)
            self.asked.setdefault(record, []).append((registry.now, retention))
            if chain[depth] in self.evictable and self.takes_what_it_finds:
                self.evictor.remove_block(self.evictable.pop(chain[depth]))
            if chain[depth] not in self.evictable:
                self.evictable[chain[depth]] = record
                self.evictor.add_block(record)

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.evictable)))
        self.evictor.remove_block(self.evictable.pop(block_hash))

    @precondition(lambda self: self.evictable)
    @rule()
    def pop(self) -> None:
        parents = {prefix.parent_hash for prefix in self.evictable.values()}
        leaves = [prefix for prefix in self.evictable.values() if prefix.block_hash not in parents]
        gone = self.evictor.evict_block()
        assert self.evictable.pop(gone.block_hash) is gone
        assert gone in leaves
        self.pop_checked(gone, leaves)

    def pop_checked(self, gone: PrefixBlock, leaves: list[PrefixBlock]) -> None:
        """Further checks of an eviction, by subclasses."""

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.evictor.registry.advance_clock(self.evictor.registry.now + seconds)

    @invariant()
    def holds(self) -> None:
        self.evictor.check(self.evictable.values())
        self.evictor.registry.check()
        now = self.evictor.registry.now
        for prefix in self.evictable.values():
            assert prefix.claims.in_force(now) == self.claim(prefix)
            assert prefix.claims.is_unwanted(now) == self.is_unwanted(prefix)

    def claim(self, prefix: PrefixBlock) -> tuple[int, float]:
        """(priority, until) of the highest claim of any request that has not expired."""
        claims = [(asked.priority, at + asked.ttl_seconds) for at, asked in self.asked[prefix] if asked is not None]
        return max((claim for claim in claims if claim[0] and claim[1] > self.evictor.registry.now), default=(0, 0.0))

    def is_unwanted(self, prefix: PrefixBlock) -> bool:
        """Whether the last request said that it is unwanted, and no request retains it."""
        at, asked = self.asked[prefix][-1]
        is_last = asked is not None and asked.priority == 0 and at + asked.ttl_seconds > self.evictor.registry.now
        return is_last and not self.claim(prefix)[0]


class LruMachine(EvictionMachine):
    """The same with LRU order."""

    order = "lru"


class ClaimMachine(EvictionMachine):
    """The same far below the retention limit: the queues are emptied in their order."""

    order, capacity = "lru", 1000
    takes_what_it_finds = True

    def pop_checked(self, gone: PrefixBlock, leaves: list[PrefixBlock]) -> None:
        unwanted = [leaf for leaf in leaves if self.is_unwanted(leaf)]
        claims = [self.claim(leaf) for leaf in leaves]
        assert not unwanted or gone in unwanted
        assert self.claim(gone) == min(claims)  # where nobody claims one, that is the least


TestCostEviction = EvictionMachine.TestCase
TestCostEviction.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
TestLruEviction = LruMachine.TestCase
TestRetentionEviction = ClaimMachine.TestCase
TestRetentionEviction.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)
TestLruEviction.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)


def test_what_is_wanted_again_stays_through_a_scan() -> None:
    """A prompt that comes back stays through a flood of prompts that do not. LRU cannot do that."""
    found = {}
    for order in ("lru", "cost"):
        pool = BlockPool(20, make_evictor(order, 20))
        found[order] = 0
        for second in range(300):
            pool.registry.advance_clock(float(second))
            if second % 10 == 0:
                found[order] += serve(pool, chain_of("again", 5))
            else:
                serve(pool, chain_of(f"once {second} ", 4))
    assert found["lru"] == 0
    assert found["cost"] > 100


@pytest.mark.parametrize("order", ["lru", "cost"])
def test_a_flood_leaves_other_tenants_their_share(order: str) -> None:
    """A tenant that floods the pool leaves a quiet tenant half of an equal share, until that one has been idle for
    PROTECTION_SECONDS."""
    pool = BlockPool(40, make_evictor(order, 40))
    quiet = chain_of("quiet", 10)
    serve(pool, quiet, "quiet")
    for number in range(500):
        serve(pool, chain_of(f"flood {number} ", 4), "flood")
    assert serve(pool, quiet, "quiet") >= 9  # 36 blocks are evictable while the flood's newest prompt runs
    assert pool.evictor.num_evictions[EvictionReason.OVER_FAIR_SHARE] > 0
    pool.registry.advance_clock(PROTECTION_SECONDS + 1)
    for number in range(20):
        serve(pool, chain_of(f"later {number} ", 4), "flood")
    assert serve(pool, quiet, "quiet") == 0


@pytest.mark.parametrize("order", ["lru", "cost"])
def test_protection_follows_a_tenants_share_at_once(order: str) -> None:
    """When the blocks of a large tenant are used again, the tenant with the most blocks of the others is protected no
    longer, at the same instant."""
    pool = BlockPool(18, make_evictor(order, 18))
    for tenant, count in (("least", 1), ("few", 3), ("many", 14)):
        for number in range(count):
            serve(pool, chain_of(f"{tenant} {number} ", 1), tenant)
    serve(pool, chain_of("one more ", 1), "many")  # evicts a block of `many`, because the others are protected
    used = (pool.get_cached_block(f"many {number} 0".encode()) for number in range(14))
    pool.share_blocks([block for block in used if block is not None])
    pool.share_blocks([block for block in (pool.get_cached_block(b"one more 0"),) if block is not None])
    pool.allocate_blocks(1)
    assert pool.get_cached_block(b"least 0 0") is not None
    assert pool.evictor.num_evictions == {EvictionReason.OVER_FAIR_SHARE: 2}


@pytest.mark.parametrize("priority", [None, 0, 50])
def test_use_after_use_takes_no_more_memory(priority: int | None) -> None:
    """A prompt requested 600 times without an eviction takes no more memory than after 400 times."""
    pool = BlockPool(40, make_evictor("cost", 40))
    retention = None if priority is None else Retention(priority, 1000.0)
    taken = []
    tracemalloc.start()
    for number in range(600):
        pool.registry.advance_clock(number * 0.1)
        serve(pool, chain_of("again", 2), retention=retention)
        pool.drain_events()
        if number % 200 == 199:
            taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert taken[2] - taken[1] < 4_000


def test_ghosts_are_bounded() -> None:
    """The registry forgets the oldest ghosts and recognises the others."""
    pool = BlockPool(8, make_evictor("cost", 8, ghosts=100))
    for number in range(200):
        serve(pool, chain_of(f"prompt {number} ", 4))
        pool.registry.check()
    assert len(pool.registry) <= 108
    pool.registry.record_request(chain_of("prompt 180 ", 4))
    assert pool.registry.record_computed(b"prompt 180 0", b"").num_requests == 2
    assert pool.registry.record_computed(b"prompt 0 0", b"").num_requests == 1
