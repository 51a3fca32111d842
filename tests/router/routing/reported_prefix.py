"""A prompt, and the KV events by which a group reports its blocks."""

from coatcheck.proto.block_hash import block_key, hash_chain
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, KvEvent

PROMPT = list(range(100, 140))


def blocks(salt: str = "") -> list[KvEvent]:
    """The prompt's blocks, as a group that has computed it would report them."""
    chain = hash_chain(block_key(salt=salt, model="tiny", fingerprint="weights"), PROMPT, 4)
    return [
        KvEvent(stored=True, block_hash=block, parent_hash=parent, tier=TIER_DEVICE)
        for parent, block in zip([b"", *chain], chain, strict=False)
    ]
