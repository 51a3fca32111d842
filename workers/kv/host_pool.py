"""HostPool: which host block holds which prefix block, and which host blocks a copy reads or writes.

A host block is a block of host memory, with the same number on every rank. It is

    free
    demoting    a device block is being copied into it. A restore may be planned already: the copies of one host block
                run in order
    held        every rank has copied its part of the prefix block, and a stored event was sent to routers
    corrupt     a checksum did not match. The block becomes free when the last copy that uses it has ended

A host block that a restore reads is *pinned* and cannot be evicted.
"""

from collections import Counter
from collections.abc import Iterable

from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.prefix_registry import PrefixBlock


class HostPool:
    """Host blocks 0 to `num_blocks` - 1; none without a host tier. `num_demotions`, `num_restores`: copies that have
    ended. `num_corrupt`: restores whose checksum did not match."""

    def __init__(self, num_blocks: int, evictor: Evictor) -> None:
        self.num_blocks = num_blocks
        self.evictor = evictor
        self.num_demotions = self.num_restores = self.num_corrupt = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._prefixes: list[PrefixBlock | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._demoting: set[int] = set()
        self._pins: Counter[int] = Counter()
        self._events: list[KvEvent] = []

    @property
    def num_held(self) -> int:
        """Blocks that every rank has copied."""
        return len(self._by_hash) - sum(self._prefixes[host_block] is not None for host_block in self._demoting)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the block can be restored."""
        return block_hash in self._by_hash

    def begin_demotion(self, prefix: PrefixBlock) -> int | None:
        """Reserve a host block for a prefix block that is not in this pool. None if copies use every host block."""
        assert prefix.block_hash not in self._by_hash, "the block is here already"
        host_block = self._allocate_block()
        if host_block is not None:
            self._prefixes[host_block] = prefix
            self._by_hash[prefix.block_hash] = host_block
            self._demoting.add(host_block)
        return host_block

    def end_demotion(self, host_block: int) -> None:
        """Mark the host block as held, because every rank has copied its part."""
        self._demoting.remove(host_block)
        self.num_demotions += 1
        if (prefix := self._prefixes[host_block]) is not None:
            self._events.append(KvEvent(True, prefix.block_hash, prefix.parent_hash, Tier.HOST))
        self._release_block(host_block)

    def begin_restore(self, block_hash: bytes) -> int:
        """Pin and return the host block of a prefix block that is in this pool. `end_restore` unpins it."""
        host_block = self._by_hash[block_hash]
        prefix = self._prefixes[host_block]
        assert prefix is not None
        if prefix in self.evictor:
            self.evictor.remove_block(prefix)
        self._pins[host_block] += 1
        return host_block

    def end_restore(self, host_block: int, *, is_intact: bool | None) -> None:
        """Unpin the host block. `is_intact`: whether the checksums matched on every rank; None if no rank read it."""
        assert self._pins[host_block] > 0, f"no restore reads host block {host_block}"
        self._pins[host_block] -= 1
        if is_intact is not None:
            self.num_restores += 1
        if is_intact is False:
            self.num_corrupt += 1
            self._discard_block(host_block)
        self._release_block(host_block)

    def requeue_block(self, block_hash: bytes) -> None:
        """Queue a block of this pool for eviction again, as just used and with its present retention claims."""
        if (prefix := self._prefixes[self._by_hash[block_hash]]) is not None:
            self.evictor.requeue_block(prefix)

    def evict_unused_blocks(self) -> None:
        """Evict every block that is not being copied."""
        while len(self.evictor):
            self._free.append(self._evict_block())

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def prefix_hashes(self) -> list[bytes]:
        """The hash of each block that is held or being demoted."""
        return list(self._by_hash)

    def stored_events(self, hashes: Iterable[bytes]) -> list[KvEvent]:
        """A stored event for each of these blocks that is held."""
        blocks = (self._by_hash.get(block_hash) for block_hash in hashes)
        held = (block for block in blocks if block is not None and block not in self._demoting)
        prefixes = (self._prefixes[block] for block in held)
        return [KvEvent(True, prefix.block_hash, prefix.parent_hash, Tier.HOST) for prefix in prefixes if prefix]

    def check(self) -> None:
        """Raises AssertionError unless every host block is in one state."""
        free, evictable = set(self._free), set[int]()
        assert len(free) == len(self._free), "a host block is free twice"
        for host_block, prefix in enumerate(self._prefixes):
            is_copied = bool(self._pins[host_block]) or host_block in self._demoting
            assert (host_block in free) == (prefix is None and not is_copied), (
                f"host block {host_block} is free and in use, or lost"
            )
            if prefix is not None:
                assert self._by_hash[prefix.block_hash] == host_block, f"host block {host_block}: found under no hash"
                assert (prefix in self.evictor) == (not is_copied), (
                    f"host block {host_block}: the evictor is wrong about it"
                )
                evictable |= set() if is_copied else {host_block}
        assert len(evictable) == len(self.evictor), "the evictor has blocks that are not here"
        assert len(self._by_hash) == sum(prefix is not None for prefix in self._prefixes), "a hash has no host block"

    def _allocate_block(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._evict_block() if len(self.evictor) else None

    def _evict_block(self) -> int:
        prefix = self.evictor.evict_block()
        host_block = self._by_hash.pop(prefix.block_hash)
        self._prefixes[host_block] = None
        self._events.append(KvEvent(False, prefix.block_hash, prefix.parent_hash, Tier.HOST))
        return host_block

    def _discard_block(self, host_block: int) -> None:
        if (prefix := self._prefixes[host_block]) is None:
            return  # another restore discarded it before
        prefix.is_corrupt = True
        self._prefixes[host_block] = None
        del self._by_hash[prefix.block_hash]
        if host_block not in self._demoting:
            self._events.append(KvEvent(False, prefix.block_hash, prefix.parent_hash, Tier.HOST))

    def _release_block(self, host_block: int) -> None:
        """Make a host block that no copy uses any more evictable or free."""
        if self._pins[host_block] or host_block in self._demoting:
            return
        del self._pins[host_block]
        if (prefix := self._prefixes[host_block]) is not None:
            self.evictor.add_block(prefix)
        else:  # its block was corrupt
            self._free.append(host_block)
