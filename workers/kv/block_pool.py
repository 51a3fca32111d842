"""BlockPool: who holds which block of the KV pool, and which blocks hold a known prefix.

Blocks are numbers here. A block is *used* (reference count above 0), *cold* (nobody holds it, but its prefix may be
wanted again) or *free*. Its eviction says which cold block is given away; `release` takes a sequence's blocks deepest
first, so that a suffix can go before the prefix that it needs. What an evicted prefix leaves in its block (a
*leftover*) can still be copied elsewhere until whoever has the block now writes to it. It does not know what a block's
bytes are, on how many ranks they lie, nor which sequence holds it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coatcheck.workers.core.cache_reasons import EvictionReason, Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.eviction import Eviction
from coatcheck.workers.kv.eviction_policy import LeastRecentlyUsed
from coatcheck.workers.kv.prefix_registry import Prefix, PrefixRegistry

# A record is some 500 bytes, a block a megabyte or more: what was evicted is remembered much longer than it was held.
_GHOSTS_PER_BLOCK: Final = 64
_MOST_GHOSTS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class BlockPoolStats:
    """Blocks by state; `evictions` counts cold blocks given away since the start, by why."""

    total: int
    used: int
    cold: int
    free: int
    evictions: Mapping[EvictionReason, int]


def max_ghosts(num_blocks: int) -> int:
    """How many records a book for tiers of so many blocks should keep of blocks that nobody holds."""
    return max(2 * num_blocks, min(_GHOSTS_PER_BLOCK * num_blocks, _MOST_GHOSTS))


class BlockPool:
    """Reference-counted blocks 0 to num_blocks - 1 with a prefix cache over the full ones.

    `eviction` is this tier's own; its book of records may be shared with other tiers.
    """

    def __init__(self, num_blocks: int, eviction: Eviction | None = None) -> None:
        self.num_blocks = num_blocks
        if eviction is None:
            eviction = Eviction(PrefixRegistry(max_ghosts(num_blocks)), LeastRecentlyUsed(), num_blocks)
        self._cold = eviction
        self.book = self._cold.book
        self._refs = [0] * num_blocks
        self._names: list[Prefix | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        # In order of eviction. An OrderedDict, because a plain dict finds its first key by a scan of all deleted slots.
        self._leftovers: OrderedDict[int, Prefix] = OrderedDict()
        self._events: list[KvEvent] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and cold ones."""
        return len(self._free) + len(self._cold)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has seen that so many are available."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, or None."""
        return self._by_hash.get(block_hash)

    def is_cold(self, block: int) -> bool:
        """Whether nobody holds the block now."""
        return self._refs[block] == 0

    def is_shared(self, block: int) -> bool:
        """Whether more than one holds the block."""
        return self._refs[block] > 1

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may write it: shared blocks and named ones are copied first."""
        return self._refs[block] == 1 and self._names[block] is None

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each."""
        for block in blocks:
            name = self._names[block]
            if name is not None and self._refs[block] == 0:
                self._cold.remove(name)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one reference to each; give a sequence's blocks in order, they are taken deepest first."""
        for block in reversed(list(blocks)):
            assert self._refs[block] > 0, f"block {block} released but not held"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                name = self._names[block]
                if name is None:
                    self._free.append(block)
                else:
                    self._cold.insert(name)

    def register(self, block: int, block_hash: bytes, parent_hash: bytes, depth: int = 0, tenant: str = "") -> int:
        """Names a full, computed block. Returns the block that holds this prefix: another one if it was there first."""
        assert self._names[block] is None, f"block {block} already has a name"
        known = self._by_hash.setdefault(block_hash, block)
        if known == block:
            self._names[block] = self.book.name(block_hash, parent_hash, depth, tenant)
            self._events.append(KvEvent(True, block_hash, parent_hash, Tier.DEVICE))
        return known

    def touch(self, block_hash: bytes) -> None:
        """Something else is asked of this prefix: if nobody holds its block, it stands in line anew."""
        block = self._by_hash.get(block_hash)
        name = self._names[block] if block is not None else None
        if name is not None and name in self._cold:
            self._cold.remove(name)
            self._cold.insert(name)

    def take_leftover(self, block: int) -> Prefix | None:
        """The evicted prefix whose bytes still lie in the block; ask before every write, it is told only once."""
        return self._leftovers.pop(block, None)

    def first_leftover(self) -> int | None:
        """The block that has had a leftover for longest."""
        return next(iter(self._leftovers), None)

    def drain_events(self) -> list[KvEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[KvEvent]:
        """Every prefix block held, parents before children wherever the parent is held."""
        return [
            KvEvent(True, name.block_hash, name.parent_hash, Tier.DEVICE)
            for block in self._by_hash.values()
            if (name := self._names[block]) is not None
        ]

    def stats(self) -> BlockPoolStats:
        """Counts as of now."""
        used = self.num_blocks - self.num_available
        return BlockPoolStats(self.num_blocks, used, len(self._cold), len(self._free), dict(self._cold.by_reason))

    def check(self, tables: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError unless every block is in exactly one state and held as often as `tables` say."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        cold = {block for block, name in enumerate(self._names) if name is not None and name in self._cold}
        self._cold.check(name for block in cold if (name := self._names[block]) is not None)
        for block, refs in enumerate(self._refs):
            name = self._names[block]
            assert refs == held[block], f"block {block}: {refs} references, {held[block]} holders"
            assert (refs == 0) == (block in free or block in cold), f"block {block}: {refs} references, wrong list"
            assert name is None or self._by_hash[name.block_hash] == block, f"block {block}: its name leads elsewhere"
            assert not (block in free and name), f"block {block} is free but named"
            assert not (name and block in self._leftovers), f"block {block} was written over a leftover"
        named = sum(name is not None for name in self._names)
        assert len(self._by_hash) == named, "a hash names no block"

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            name = self._cold.pop()
            block = self._by_hash.pop(name.block_hash)
            self._names[block] = None
            self._leftovers[block] = name
            self._events.append(KvEvent(False, name.block_hash, b"", Tier.DEVICE))
        self._refs[block] = 1
        return block
