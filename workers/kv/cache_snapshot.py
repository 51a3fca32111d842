"""CacheSnapshot: the prefix blocks of both tiers and the snapshots of states, read in chunks.

The caches change between two chunks. A subscriber applies chunks and KV events in the order in which they were made. It
then never knows a block that the tiers lack, and after the last chunk it knows every block that they have. A chunk
leaves out the blocks that were evicted since the snapshot began. A block that was stored since then has an event.
"""

from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.host_pool import HostPool
from coatcheck.workers.kv.state_snapshots import StateSnapshots


class CacheSnapshot:
    """Create it, and read each chunk, between two steps, when all KV events have been drained. Otherwise an event older
    than a chunk could follow the chunk, and a subscriber would count blocks that have been evicted."""

    def __init__(self, *tiers: BlockPool | HostPool | StateSnapshots) -> None:
        # Copies only the hashes: to make the events of all blocks at once would delay the engine's next step.
        listed = [(tier, tier.prefix_hashes()) for tier in tiers]
        self._unread = [(tier, hashes) for tier, hashes in listed if hashes]
        self._position = 0  # in the first list

    @property
    def is_complete(self) -> bool:
        """Whether every block was read."""
        return not self._unread

    def read_chunk(self, max_blocks: int) -> list[KvEvent]:
        """Stored events of up to `max_blocks` further blocks, without those evicted meanwhile. Parents come before
        their children. Empty once complete."""
        if self.is_complete:
            return []
        pool, hashes = self._unread[0]
        part = hashes[self._position : self._position + max_blocks]
        self._position += len(part)
        if self._position == len(hashes):
            del self._unread[0]
            self._position = 0
        return pool.stored_events(part)
