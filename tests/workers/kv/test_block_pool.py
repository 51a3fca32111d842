"""The block pool under every order of use."""

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.workers.kv.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences take, share, name and give up blocks; after each operation every invariant holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10)
        self.tables: list[list[int]] = []
        self.held: set[bytes] = set()
        self.names = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            self.tables.append(self.pool.allocate(count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.tables)))
        self.pool.share(table)
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data: st.DataObject, name: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        if self.pool.is_writable(block):
            self.pool.take_leftover(block)  # it has been written, and whoever writes asks first
            known = self.pool.register(block, bytes([name]), b"")
            assert self.pool.lookup(bytes([name])) == known

    @rule(name=st.integers(0, 5))
    def hit(self, name: int) -> None:
        block = self.pool.lookup(bytes([name]))
        if block is not None:
            self.pool.share([block])
            self.tables.append([block])

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables)
        for event in self.pool.drain_events():
            assert (event.block_hash in self.held) != event.stored
            self.held ^= {event.block_hash}
        assert self.held == {event.block_hash for event in self.pool.snapshot()}


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_cold_suffix_goes_before_its_prefix() -> None:
    """Of one sequence's cold blocks the deepest is given away first, and the least recently used sequence's first."""
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for i, block in enumerate([*first, *second]):
        pool.register(block, bytes([i]), b"")
    pool.release(first)
    pool.release(second)
    pool.drain_events()
    pool.allocate(3)
    assert [event.block_hash for event in pool.drain_events()] == [b"\x01", b"\x00", b"\x03"]


def test_check_sees_a_lost_block() -> None:
    """A block held by nobody that still has a reference is reported."""
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check([])


def test_taking_the_first_leftover_costs_the_same_however_many_are_gone() -> None:
    """Leftovers are taken in the order of eviction, each as quickly as the first, however many there were."""

    def seconds_each(blocks: int) -> float:
        """The time to take the last 500 of `leftovers`, best of three pools."""
        best = float("inf")
        for _ in range(3):
            pool = BlockPool(blocks)
            table = pool.allocate(blocks)
            for block in table:
                pool.register(block, block.to_bytes(16, "little"), b"")
            pool.release(table)
            pool.allocate(blocks)  # each prefix is evicted
            taken = []
            began = 0.0
            for place in range(blocks):
                if place == blocks - 500:
                    began = time.perf_counter()
                first = pool.first_leftover()
                assert first is not None
                pool.take_leftover(first)
                taken.append(first)
            best = min(best, time.perf_counter() - began)
            assert sorted(taken) == sorted(table) and pool.first_leftover() is None
        return best

    assert seconds_each(20_000) < 20 * seconds_each(500)
