"""The host pool under random sequences of operations."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.prefix_registry import PrefixRegistry
from tests.examples import examples
from tests.workers.kv.pool_visit import make_evictor


class HostPoolMachine(RuleBasedStateMachine):
    """Blocks are demoted, restored, found corrupt and evicted. Every invariant holds after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.host_pool = HostPool(4, make_evictor("lru", 4))
        self.registry = PrefixRegistry(16)
        self.demoting: list[int] = []
        self.reading: list[int] = []
        self.held: set[bytes] = set()

    @rule(name=st.integers(0, 7))
    def demote(self, name: int) -> None:
        block_hash = bytes([name])
        if block_hash in self.host_pool:
            self.host_pool.requeue_block(block_hash)
            return
        host_block = self.host_pool.begin_demotion(self.registry.record_computed(block_hash, b""))
        if host_block is None:
            assert len({*self.demoting, *self.reading}) == 4, "room was refused"
        else:
            assert host_block not in self.demoting and host_block not in self.reading, (
                "a host block in use was given away"
            )
            self.demoting.append(host_block)

    @precondition(lambda self: self.demoting)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.host_pool.end_demotion(self.demoting.pop(data.draw(st.integers(0, len(self.demoting) - 1))))

    @rule(name=st.integers(0, 7))
    def read(self, name: int) -> None:
        if bytes([name]) in self.host_pool:
            self.reading.append(self.host_pool.begin_restore(bytes([name])))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), intact=st.sampled_from([True, False, None]))
    def finish(self, data: st.DataObject, intact: bool | None) -> None:
        self.host_pool.end_restore(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))), is_intact=intact)

    @invariant()
    def holds(self) -> None:
        self.host_pool.check()
        for event in self.host_pool.drain_events():
            assert (event.block_hash in self.held) != event.stored, "stored twice or removed unheld"
            self.held ^= {event.block_hash}
        stored = self.host_pool.stored_events(self.host_pool.prefix_hashes())
        assert Counter(self.held) == Counter(event.block_hash for event in stored)
        assert self.host_pool.num_held == len(self.held)


TestHostPool = HostPoolMachine.TestCase
TestHostPool.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_block_is_held_only_when_its_copy_has_ended() -> None:
    """While a block is being demoted there is no event, but it can be restored already."""
    host_pool, prefix = HostPool(2, make_evictor("lru", 2)), PrefixRegistry(4).record_computed(b"a", b"")
    host_block = host_pool.begin_demotion(prefix)
    assert host_block is not None and b"a" in host_pool
    assert not host_pool.drain_events() and not host_pool.stored_events([b"a"])
    host_pool.end_demotion(host_block)
    assert [event.block_hash for event in host_pool.drain_events()] == [b"a"]


def test_a_broken_block_is_a_miss_and_counted() -> None:
    """A corrupt block is removed at once. The host block is free when the last restore of it has ended."""
    host_pool = HostPool(1, make_evictor("lru", 1))
    host_block = host_pool.begin_demotion(PrefixRegistry(4).record_computed(b"a", b""))
    assert host_block is not None
    host_pool.end_demotion(host_block)
    assert host_pool.begin_restore(b"a") == host_pool.begin_restore(b"a") == host_block
    host_pool.end_restore(host_block, is_intact=False)
    assert b"a" not in host_pool and not host_pool._free
    host_pool.end_restore(host_block, is_intact=True)
    assert host_pool._free == [host_block] and host_pool.num_corrupt == 1


def test_a_restore_ends_only_once() -> None:
    """Ending a restore twice is an error, because it would free a host block that another restore reads."""
    host_pool = HostPool(1, make_evictor("lru", 1))
    host_block = host_pool.begin_demotion(PrefixRegistry(4).record_computed(b"a", b""))
    assert host_block is not None
    host_pool.end_demotion(host_block)
    host_pool.begin_restore(b"a")
    host_pool.end_restore(host_block, is_intact=True)
    with pytest.raises(AssertionError, match="no restore reads host block 0"):
        host_pool.end_restore(host_block, is_intact=True)
