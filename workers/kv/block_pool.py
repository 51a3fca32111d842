"""BlockPool: reference counts of the KV pool's blocks, and which blocks hold which prefix.

A block is *used* (reference count above 0), *cached* (no reference; prompts find its prefix, and it can be evicted) or
*free*. Callers release all blocks of a sequence in one call, so that its last block becomes evictable first. The KV of
an evicted prefix stays in its block until the block's next owner writes to it. Until then the block can be demoted to
the host tier. The snapshot of states at an evicted block is dropped at once: no prompt can start there without the KV.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.prefix_registry import PrefixBlock
from coatcheck.workers.kv.state_snapshots import StateSnapshots


class BlockPool:
    """Blocks 0 to `num_blocks` - 1. `states`: the snapshots at these blocks; None unless the model keeps states."""

    def __init__(self, num_blocks: int, evictor: Evictor, states: StateSnapshots | None = None) -> None:
        self.num_blocks = num_blocks
        self.evictor = evictor
        self.states = states
        self.registry = evictor.registry
        self._ref_counts = [0] * num_blocks
        self._prefixes: list[PrefixBlock | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        # Blocks that still hold the KV of an evicted prefix, in the order of eviction. An OrderedDict, because a plain
        # dict scans all deleted slots to find its first key.
        self._evicted: OrderedDict[int, PrefixBlock] = OrderedDict()
        self._events: list[KvEvent] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate_blocks` can give: free and cached ones."""
        return len(self._free) + len(self.evictor)

    def allocate_blocks(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Evicts cached blocks if free ones run out.

        `count` must not exceed `num_available`.
        """
        assert count <= self.num_available, f"{count} blocks requested, {self.num_available} available"
        return [self._allocate_block() for _ in range(count)]

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, used or cached. None if there is none."""
        return self._by_hash.get(block_hash)

    def is_unused(self, block: int) -> bool:
        return self._ref_counts[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def is_writable(self, block: int) -> bool:
        """Whether the block's owner may write to it. Shared blocks and prefix blocks must be copied first."""
        return self._ref_counts[block] == 1 and self._prefixes[block] is None

    def share_blocks(self, blocks: Iterable[int]) -> None:
        """Add one reference to each."""
        for block in blocks:
            prefix = self._prefixes[block]
            if prefix is not None and self._ref_counts[block] == 0:
                self.evictor.remove_block(prefix)
            self._ref_counts[block] += 1

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each. `blocks`: in the order of the block table of their sequence."""
        for block in reversed(list(blocks)):
            assert self._ref_counts[block] > 0, f"block {block} released but not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if (prefix := self._prefixes[block]) is None:
                    self._free.append(block)
                else:
                    self.evictor.add_block(prefix)

    def register_block(
        self, block: int, block_hash: bytes, parent_hash: bytes, depth: int = 0, tenant: str = ""
    ) -> int:
        """Add a full, computed block to the prefix cache. Return the block that holds this prefix: `block`, or the
        block that was registered for `block_hash` before. `depth`: the number of blocks before it in the prompt."""
        assert self._prefixes[block] is None, f"block {block} already has a prefix"
        known = self._by_hash.setdefault(block_hash, block)
        if known == block:
            self._prefixes[block] = self.registry.record_computed(block_hash, parent_hash, depth, tenant)
            self._events.append(KvEvent(True, block_hash, parent_hash, Tier.DEVICE))
        return known

    def requeue_block(self, block_hash: bytes) -> None:
        """Queue a cached block for eviction again, after its retention claims have changed. No effect on others."""
        block = self._by_hash.get(block_hash)
        if block is not None and (prefix := self._prefixes[block]) is not None:
            self.evictor.requeue_block(prefix)

    def pop_evicted_block(self, block: int) -> PrefixBlock | None:
        """The evicted prefix block whose KV is still in `block`, or None. Call this before every write to `block`."""
        return self._evicted.pop(block, None)

    def oldest_evicted_block(self) -> int | None:
        """The block that has held the KV of an evicted prefix for longest, or None."""
        return next(iter(self._evicted), None)

    def evict_unused_blocks(self) -> None:
        """Evict every prefix block that no sequence uses. Their KV is not demoted."""
        while len(self.evictor):
            self._free.append(self._evict_block())
        self._evicted.clear()

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def prefix_hashes(self) -> list[bytes]:
        """The hash of each prefix block, parents before children."""
        return list(self._by_hash)

    def stored_events(self, hashes: Iterable[bytes]) -> list[KvEvent]:
        """A stored event for each of these prefix blocks that the pool still has."""
        blocks = (self._by_hash.get(block_hash) for block_hash in hashes)
        prefixes = (self._prefixes[block] for block in blocks if block is not None)
        return [KvEvent(True, prefix.block_hash, prefix.parent_hash, Tier.DEVICE) for prefix in prefixes if prefix]

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError unless every block is in one state and has a reference for each place in `tables`."""
        holders = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        cached = {block: prefix for block, prefix in enumerate(self._prefixes) if prefix and prefix in self.evictor}
        self.evictor.check(cached.values())
        for block, refs in enumerate(self._ref_counts):
            prefix = self._prefixes[block]
            assert refs == holders[block], f"block {block}: {refs} references, {holders[block]} holders"
            assert (refs == 0) == (block in free or block in cached), f"block {block}: {refs} references, wrong list"
            assert prefix is None or self._by_hash[prefix.block_hash] == block, f"block {block}: found under no hash"
            assert not (block in free and prefix), f"block {block} is free and has a prefix"
            assert not (prefix and block in self._evicted), f"block {block} holds two prefixes"
        assert len(self._by_hash) == sum(prefix is not None for prefix in self._prefixes), "a hash has no block"
        snapshots = set() if self.states is None else {*self.states.prefix_hashes()}
        assert snapshots <= self._by_hash.keys(), "a snapshot has outlived its block"

    def _allocate_block(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._evict_block()
        self._ref_counts[block] = 1
        return block

    def _evict_block(self) -> int:
        prefix = self.evictor.evict_block()
        block = self._by_hash.pop(prefix.block_hash)
        self._prefixes[block] = None
        self._evicted[block] = prefix
        self._events.append(KvEvent(False, prefix.block_hash, prefix.parent_hash, Tier.DEVICE))
        if self.states is not None:
            self.states.drop_block(prefix.block_hash)
        return block
