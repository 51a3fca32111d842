"""PrefixLookup: how much of what a sequence needs is in the tiers, or will be soon, and what is said of it.

It does not know whether there is room for the rest, nor who goes first.
"""

from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.kv.kv_cache_manager import KVCacheManager
from coatcheck.workers.kv.promises import PendingBlocks


class PrefixLookup:
    """Over one scheduler's tiers; `promises` are those of its running sequences."""

    def __init__(self, tiers: KVCacheManager, block_size: int) -> None:
        self.promises = PendingBlocks()
        self._tiers = tiers
        self._block_size = block_size

    def cacheable(self, sequence: Sequence) -> int:
        """Leading blocks that it might find: at least one token must be computed, for its logits."""
        return min(len(sequence.block_hashes), (len(sequence.token_ids) - 1) // self._block_size)

    def find(self, sequence: Sequence, *, beside_decodes: bool) -> list[int | None]:
        """The leading blocks that need not be computed, None where one is to be restored; as Tiers.find has them."""
        if sequence.wants_prompt_logprobs:
            return []
        return self._tiers.find(sequence.block_hashes[: self.cacheable(sequence)], beside_decodes=beside_decodes)

    def is_promised(self, sequence: Sequence, *, beside_decodes: bool) -> bool:
        """Whether another computes, or restores, the next block that it needs."""
        if sequence.wants_prompt_logprobs:
            return False
        if sequence.awaited_hash in self.promises:
            return True
        found = self.find(sequence, beside_decodes=beside_decodes)
        # Another may be computing what comes next, or restoring the first of what the host has.
        wanted = {len(found), found.index(None) if None in found else len(found)}
        for index in wanted - {self.cacheable(sequence)}:
            if sequence.block_hashes[index] in self.promises:
                sequence.awaited_hash = sequence.block_hashes[index]
                return True
        return False

    def count_cached(self, sequence: Sequence, computed: int, missing: int | None) -> None:
        """Notes what was found of the prompt, and why block `missing` was not (None: it was not looked for), at the
        first admission; at a second one too, if the first found blocks that were broken."""
        if sequence.cached_device_tokens >= 0:
            return
        full = min(sequence.prompt_len // self._block_size, self.cacheable(sequence))
        if missing is not None and missing < full and not sequence.wants_prompt_logprobs:
            sequence.miss = self._tiers.explain(sequence.block_hashes[missing], missing)
        cached = min(computed, sequence.prompt_len)
        sequence.cached_host_tokens += sequence.num_restoring * self._block_size
        sequence.cached_host_tokens = min(sequence.cached_host_tokens, cached)
        sequence.cached_device_tokens = cached - sequence.cached_host_tokens
