"""One request through a BlockPool with an evictor, without engine or tensors."""

from coatcheck.proto.retention import Retention
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import create_policy
from coatcheck.workers.kv.prefix_registry import PrefixRegistry


def make_evictor(order: str, capacity: int, ghosts: int = 1000) -> Evictor:
    """An evictor with a registry of its own."""
    registry = PrefixRegistry(ghosts)
    return Evictor(registry, create_policy(order, registry.reuse_table), capacity)


def chain_of(text: str, length: int) -> list[bytes]:
    """The hashes of a prompt of `length` blocks."""
    return [f"{text}{depth}".encode() for depth in range(length)]


def serve(pool: BlockPool, chain: list[bytes], tenant: str = "", retention: Retention | None = None) -> int:
    """Look up, compute, register and release a prompt's blocks. Returns how many were cached."""
    pool.registry.record_request(chain, tenant, retention)
    found: list[int] = []
    for block_hash in chain:
        if (block := pool.get_cached_block(block_hash)) is None:
            break
        found.append(block)
    pool.share_blocks(found)
    computed = pool.allocate_blocks(len(chain) - len(found))
    for depth, block in enumerate(computed, len(found)):
        pool.register_block(block, chain[depth], chain[depth - 1] if depth else b"", depth, tenant)
    pool.release_blocks([*found, *computed])
    return len(found)
