"""The hash of a KV block: a keyed chain over token ids. Routers and workers compute the same hash.

    h_i = blake2b(h_{i-1} || tokens_i as little-endian uint32, digest_size=16, key=k)
    k   = blake2b(length-prefixed tenant salt, model, weights fingerprint, adapter; digest_size=32)

The first block has no parent: h_{-1} is empty. k covers the tenant's salt, so a tenant cannot probe another
tenant's cache.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def block_key(*, salt: str, model: str, fingerprint: str, adapter: str = "") -> bytes:
    """The 32-byte key of a tenant's hashes. `adapter`: the fingerprint of the LoRA adapter; "" without one."""
    digest = hashlib.blake2b(digest_size=32)
    for field in (salt, model, fingerprint, adapter):
        encoded = field.encode()
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def hash_block(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 16-byte hash of a full block. `parent`: hash of the previous block; empty for the first block."""
    return hashlib.blake2b(parent + _little_endian(tokens), digest_size=HASH_BYTES, key=key).digest()


def hash_chain(key: bytes, tokens: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """The hashes of the full blocks of `tokens`, in order. A partial last block has no hash."""
    packed = memoryview(_little_endian(tokens))
    stride = block_size * 4
    keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=key)  # copying this state is faster than keying each hash
    chain = []
    for start in range(0, len(tokens) // block_size * stride, stride):
        state = keyed.copy()
        state.update(parent)
        state.update(packed[start : start + stride])
        parent = state.digest()
        chain.append(parent)
    return chain


def _little_endian(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
