"""The block pool under random sequences of operations."""

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.workers.kv.block_pool import BlockPool
from tests.examples import examples
from tests.workers.kv.pool_visit import make_evictor


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences allocate, share, register and release blocks. Every invariant holds after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, make_evictor("lru", 10))
        self.tables: list[list[int]] = []
        self.held: set[bytes] = set()
        self.names = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            self.tables.append(self.pool.allocate_blocks(count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release_blocks(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.tables)))
        self.pool.share_blocks(table)
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data: st.DataObject, name: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        if self.pool.is_writable(block):
            self.pool.pop_evicted_block(block)  # as before every write
            known = self.pool.register_block(block, bytes([name]), b"")
            assert self.pool.get_cached_block(bytes([name])) == known

    @rule(name=st.integers(0, 5))
    def hit(self, name: int) -> None:
        block = self.pool.get_cached_block(bytes([name]))
        if block is not None:
            self.pool.share_blocks([block])
            self.tables.append([block])

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables)
        for event in self.pool.drain_events():
            assert (event.block_hash in self.held) != event.stored
            self.held ^= {event.block_hash}
        assert self.held == set(self.pool.prefix_hashes())
        stored = [event.block_hash for event in self.pool.stored_events([*self.pool.prefix_hashes(), b"another"])]
        assert self.held == set(stored) and len(stored) == len(self.held)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def test_a_cached_suffix_is_evicted_before_its_prefix() -> None:
    """A sequence's deepest cached block is evicted first, and the least recently used sequence's blocks go first."""
    pool = BlockPool(4, make_evictor("lru", 4))
    first, second = pool.allocate_blocks(2), pool.allocate_blocks(2)
    for i, block in enumerate([*first, *second]):
        pool.register_block(block, bytes([i]), b"")
    pool.release_blocks(first)
    pool.release_blocks(second)
    pool.drain_events()
    pool.allocate_blocks(3)
    assert [event.block_hash for event in pool.drain_events()] == [b"\x01", b"\x00", b"\x03"]


def test_check_sees_a_lost_block() -> None:
    """`check` reports a block that has a reference and no holder."""
    pool = BlockPool(3, make_evictor("lru", 3))
    pool.allocate_blocks(1)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check()


def test_the_oldest_evicted_block_is_found_in_constant_time() -> None:
    """Blocks with evicted prefixes are taken in the order of eviction, each as quickly as the first."""

    def seconds_each(blocks: int) -> float:
        """The time to take the last 500 of `blocks` evicted prefixes, best of three pools."""
        best = float("inf")
        for _ in range(3):
            pool = BlockPool(blocks, make_evictor("lru", blocks, ghosts=2 * blocks))
            table = pool.allocate_blocks(blocks)
            for block in table:
                pool.register_block(block, block.to_bytes(16, "little"), b"")
            pool.release_blocks(table)
            pool.allocate_blocks(blocks)  # each prefix is evicted
            taken = []
            began = 0.0
            for place in range(blocks):
                if place == blocks - 500:
                    began = time.perf_counter()
                first = pool.oldest_evicted_block()
                assert first is not None
                pool.pop_evicted_block(first)
                taken.append(first)
            best = min(best, time.perf_counter() - began)
            assert sorted(taken) == sorted(table) and pool.oldest_evicted_block() is None
        return best

    assert seconds_each(20_000) < 20 * seconds_each(500)
