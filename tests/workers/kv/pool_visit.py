"""A request's way through a BlockPool, with the names of its blocks and an eviction: no engine, no tensors."""

from coatcheck.proto.retention import Retention
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import Eviction
from coatcheck.workers.kv.eviction_policy import order_of
from coatcheck.workers.kv.prefix_registry import PrefixRegistry


def make_eviction(order: str, capacity: int, ghosts: int = 1000) -> Eviction:
    """An eviction of its own book."""
    book = PrefixRegistry(ghosts)
    return Eviction(book, order_of(order, book.table), capacity)


def chain_of(text: str, length: int) -> list[bytes]:
    """Hashes of a prompt's blocks."""
    return [f"{text}{depth}".encode() for depth in range(length)]


def serve(pool: BlockPool, chain: list[bytes], tenant: str = "", retention: Retention | None = None) -> int:
    """A request's way through the pool; returns how many blocks were found."""
    pool.book.want(chain, tenant, retention)
    found: list[int] = []
    for block_hash in chain:
        if (block := pool.lookup(block_hash)) is None:
            break
        found.append(block)
    pool.share(found)
    computed = pool.allocate(len(chain) - len(found))
    for depth, block in enumerate(computed, len(found)):
        pool.register(block, chain[depth], chain[depth - 1] if depth else b"", depth, tenant)
    pool.release([*found, *computed])
    return len(found)
