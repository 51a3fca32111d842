"""Events of groups for tests of PrefixIndex, and what the index then matches, by the names of groups."""

from collections.abc import Sequence

from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    KvEvent,
    SnapshotChunk,
    Tier,
)
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex

CHAIN = [bytes([block]) * 16 for block in range(6)]


def stored(block: int, tier: Tier = TIER_DEVICE) -> KvEvent:
    """An event: the group has stored the block."""
    return KvEvent(stored=True, block_hash=CHAIN[block], parent_hash=_parent(block), tier=tier)


def removed(block: int, tier: Tier = TIER_DEVICE) -> KvEvent:
    """An event: the group has removed the block."""
    return KvEvent(stored=False, block_hash=CHAIN[block], parent_hash=_parent(block), tier=tier)


def _parent(block: int) -> bytes:
    return CHAIN[block - 1] if block else b""


def snapshot(*events: KvEvent, epoch: str = "1", sequence: int = 0) -> SnapshotChunk:
    """A snapshot in one chunk."""
    return SnapshotChunk(epoch=epoch, sequence=sequence, events=events, first=True, last=True)


def following(*groups: str) -> PrefixIndex:
    """An index with empty snapshots of these groups."""
    index = PrefixIndex()
    for group in groups:
        index.add_group(group, "1")
        assert index.apply_snapshot(group, snapshot()) is EventOutcome.APPLIED
    return index


def matched_blocks(index: PrefixIndex, chain: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
    """(blocks on the device, on the host, expected) of each group that has the first block of `chain`."""
    rows = list(zip(*(blocks.tolist() for blocks in index.match(chain)), strict=True))
    slots = {name: indexed.slot for name, indexed in index._groups.items()}
    return {name: tuple(map(int, rows[slot])) for name, slot in slots.items() if any(rows[slot])}
