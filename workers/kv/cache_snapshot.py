"""CacheSnapshot: the prefix blocks of both tiers and the snapshots of states, read in chunks.

The caches change between two chunks. A subscriber applies chunks and KV events in the order in which they were made.
After each of them it has only blocks that are held, and after the last chunk all blocks that are held. A chunk leaves
out a block that has been evicted since the snapshot began. A block that is stored after that is reported by its own
event.
"""

from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.state_snapshots import StateSnapshots


class CacheSnapshot:
    """Begin it and read each chunk between two steps, when every event has been drained. Otherwise an event that
    follows could be older than the chunk, and a subscriber would have more blocks than fit."""

    def __init__(self, *tiers: BlockPool | HostPool | StateSnapshots) -> None:
        # Only hashes are copied here: the events of all blocks would stop the engine's next step for long.
        listed = [(tier, tier.prefix_hashes()) for tier in tiers]
        self._unread = [(tier, hashes) for tier, hashes in listed if hashes]
        self._position = 0  # in the first list

    @property
    def is_complete(self) -> bool:
        """Whether every block was read."""
        return not self._unread

    def read_chunk(self, max_blocks: int) -> list[KvEvent]:
        """Stored events of the next `max_blocks` blocks, as far as they are still held. A parent is read before its
        children."""
        if self.is_complete:
            return []
        pool, hashes = self._unread[0]
        part = hashes[self._position : self._position + max_blocks]
        self._position += len(part)
        if self._position == len(hashes):
            del self._unread[0]
            self._position = 0
        return pool.stored_events(part)
