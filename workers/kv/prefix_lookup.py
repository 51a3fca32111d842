"""PrefixLookup: how much of a sequence's prefix is cached, or is being computed by another sequence."""

from collections.abc import Iterable

from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager


class PrefixLookup:
    """A block is *pending* while a running sequence is going to compute or restore it. Another sequence that needs the
    block waits instead of computing it twice."""

    def __init__(self, kv_cache: KVCacheManager, block_size: int) -> None:
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._pending: dict[bytes, Sequence] = {}  # by block hash

    def count_cacheable_blocks(self, sequence: Sequence) -> int:
        """Leading full blocks that may come from the cache. At least one token must be computed, for its logits."""
        return min(len(sequence.block_hashes), (len(sequence.token_ids) - 1) // self._block_size)

    def find_cached_blocks(self, sequence: Sequence, *, with_decodes: bool) -> list[int | None]:
        """The leading blocks that need not be computed; see `KVCacheManager.find_cached_blocks`."""
        if sequence.wants_prompt_logprobs:
            return []
        hashes = sequence.block_hashes[: self.count_cacheable_blocks(sequence)]
        return self._kv_cache.find_cached_blocks(hashes, with_decodes=with_decodes)

    def add_pending(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """Mark blocks as pending by `sequence`, except those that are pending by another sequence already."""
        for block_hash in hashes:
            self._pending.setdefault(block_hash, sequence)

    def remove_pending(self, sequence: Sequence, hashes: Iterable[bytes]) -> None:
        """Unmark blocks that `sequence` has registered or given up. Those pending by another sequence stay pending."""
        for block_hash in hashes:
            if self._pending.get(block_hash) is sequence:
                del self._pending[block_hash]

    def is_prefix_pending(self, sequence: Sequence, *, with_decodes: bool) -> bool:
        """Whether another sequence computes or restores the next block that `sequence` needs."""
        if sequence.wants_prompt_logprobs:
            return False
        if sequence.awaited_hash in self._pending:
            return True
        found = self.find_cached_blocks(sequence, with_decodes=with_decodes)
        # The next block to compute, and the first block to restore.
        needed = {len(found), found.index(None) if None in found else len(found)}
        for index in needed - {self.count_cacheable_blocks(sequence)}:
            if sequence.block_hashes[index] in self._pending:
                sequence.awaited_hash = sequence.block_hashes[index]
                return True
        return False

    def record_cached_tokens(self, sequence: Sequence, num_cached: int, missing: int | None) -> None:
        """At admission, record in `sequence` how much of its prompt was cached, and why block `missing` was not.

        `missing`: None if the cache was not searched. No effect at a later admission, unless a restore of the earlier
        one found a corrupt block.
        """
        if sequence.cached_device_tokens >= 0:
            return
        num_full = min(sequence.prompt_len // self._block_size, self.count_cacheable_blocks(sequence))
        if missing is not None and missing < num_full and not sequence.wants_prompt_logprobs:
            sequence.miss = self._kv_cache.explain_miss(sequence.block_hashes[missing], missing)
        cached = min(num_cached, sequence.prompt_len)
        sequence.cached_host_tokens += sequence.num_restoring * self._block_size
        sequence.cached_host_tokens = min(sequence.cached_host_tokens, cached)
        sequence.cached_device_tokens = cached - sequence.cached_host_tokens
