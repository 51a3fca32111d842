"""PendingBlocks: the prefix blocks that running sequences are about to compute. Others wait for them.

A block is promised by the first that will have it. It does not know whether a promise is worth waiting for.
"""

from collections.abc import Iterable

from coatcheck.workers.core.sequence import Sequence


class PendingBlocks:
    """By block hash. A promise ends when it is kept, or when its sequence gives up its blocks."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Sequence] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def make(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """Those that nobody else has promised."""
        for block_hash in hashes:
            self._by_hash.setdefault(block_hash, sequence)

    def end(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """Kept or withdrawn: of these, those that are its own."""
        for block_hash in hashes:
            if self._by_hash.get(block_hash) is sequence:
                del self._by_hash[block_hash]
