"""PrefixRegistry: one record for each known prefix block: its parent, tenant, reuse history and retention.

All tiers share the record of a block. After the last tier has evicted the block, the record stays for a while as a
*ghost*, so that the reuse of an evicted block counts too. Every request is recorded when it arrives, whether it hits or
misses the cache. The `ReuseTable` learns from these records.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self
from weakref import WeakValueDictionary

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import EvictionMark, MissReason, PrefixMiss
from coatcheck.workers.kv.reuse_table import Cohort, ReuseTable

# Kinds of cohorts: blocks requested once, twice ... ten times or more, and generated blocks that no request asked for.
_MAX_REQUESTS: Final = 10
_GENERATED: Final = _MAX_REQUESTS
_MAX_TENANTS: Final = 4096
# A ghost takes about 500 bytes and a block a megabyte or more, so ghosts outnumber blocks.
_GHOSTS_PER_BLOCK: Final = 64
_MAX_GHOSTS: Final = 1 << 18


def choose_max_ghosts(num_blocks: int) -> int:
    """The number of ghosts for tiers of `num_blocks` together."""
    return max(2 * num_blocks, min(_GHOSTS_PER_BLOCK * num_blocks, _MAX_GHOSTS))


@dataclass(frozen=True, slots=True)
class RetentionClaims:
    """The retention that requests have asked for one block.

    Requests of one salt share blocks. The claim in force is the one with the highest priority that has not expired, so
    no request undoes the claim of another. Priority 0 (not needed again) counts only if no claim is in force, and only
    until the next request for the block.

    `claims`: (priority, until), highest priority first. Each lasts longer than those before it. `unwanted_until`: when
    priority 0 expires. Times are in seconds of the engine's clock.
    """

    claims: tuple[tuple[int, float], ...] = ()
    unwanted_until: float = 0.0

    def with_request(self, retention: Retention | None, now: float) -> Self:
        """The claims after one more request, without expired ones."""
        if retention is not None and retention.priority == 0:
            return replace(self, unwanted_until=now + retention.ttl_seconds)
        if retention is None:
            return replace(self, unwanted_until=0.0)
        new = retention.priority, now + retention.ttl_seconds
        claims: list[tuple[int, float]] = []
        for claim in sorted({*self.claims, new}, reverse=True):
            if claim[1] > (claims[-1][1] if claims else now):
                claims.append(claim)
        return replace(self, claims=tuple(claims), unwanted_until=0.0)

    def in_force(self, now: float) -> tuple[int, float]:
        """(priority, until) of the claim in force; (0, 0.0) if there is none."""
        return next((claim for claim in self.claims if claim[1] > now), (0, 0.0))

    def is_unwanted(self, now: float) -> bool:
        """Whether the block should be evicted before all others."""
        return self.unwanted_until > now and not self.in_force(now)[0]


NO_CLAIMS: Final = RetentionClaims()


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefixBlock:
    """The record of one full block. `block_hash` covers all blocks before it.

    `depth`: the number of blocks before it. `tenant`: whose share of the cache the block counts towards.
    `num_requests`: how many requests asked for the block. `cohort`: the blocks last requested together with it; None
    once the registry has forgotten its history. `eviction`: when and why it left the last tier; None while a tier holds
    it. `is_corrupt`: its checksum in the host tier did not match.
    `content`: the hash of its tokens and all before them, without the salt (`content_chain`); 0 if unknown.
    """

    block_hash: bytes
    parent_hash: bytes
    depth: int = 0
    tenant: str = ""
    num_requests: int = 0
    cohort: Cohort | None = None
    claims: RetentionClaims = NO_CLAIMS
    eviction: EvictionMark | None = None
    is_corrupt: bool = False
    content: int = 0


class PrefixRegistry:
    """`max_ghosts`: how many of the records that were last requested or computed stay alive without a tier."""

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.reuse_table = ReuseTable(_MAX_REQUESTS + 1)
        self._records: WeakValueDictionary[bytes, PrefixBlock] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, PrefixBlock] = OrderedDict()  # keeps ghosts alive
        self._first_by_content: WeakValueDictionary[int, PrefixBlock] = WeakValueDictionary()
        self._last_request_at: OrderedDict[str, float] = OrderedDict()  # by tenant

    def __len__(self) -> int:
        return len(self._records)

    @property
    def now(self) -> float:
        """The time of the last `advance_clock`, in seconds."""
        return self.reuse_table.now

    def advance_clock(self, now: float) -> None:
        self.reuse_table.advance_clock(now)

    def record_request(
        self,
        hashes: Sequence[bytes],
        tenant: str = "",
        retention: Retention | None = None,
        contents: Sequence[int] = (),
    ) -> None:
        """Record that a request asks for the chain of blocks `hashes`. Call this once for each request.

        `contents`: the `content_chain` of the same blocks, or empty.
        """
        self._last_request_at[tenant] = self.now
        self._last_request_at.move_to_end(tenant)
        if len(self._last_request_at) > _MAX_TENANTS:
            self._last_request_at.popitem(last=False)
        cohorts: dict[int, Cohort] = {}
        parent_hash = b""
        for depth, block_hash in enumerate(hashes):
            record = self._get_or_create(block_hash, parent_hash, depth, tenant)
            if record.cohort is not None:
                self.reuse_table.record_reuse(record.cohort)
            record.num_requests += 1
            kind = min(record.num_requests, _MAX_REQUESTS) - 1
            if (cohort := cohorts.get(kind)) is None:
                cohort = cohorts[kind] = self.reuse_table.create_cohort(kind)
            self.reuse_table.add_block(cohort)
            record.cohort = cohort
            if retention is not None or record.claims is not NO_CLAIMS:
                record.claims = record.claims.with_request(retention, self.now)
            if depth < len(contents) and not record.content:
                record.content = contents[depth]
                self._first_by_content.setdefault(record.content, record)
            parent_hash = block_hash

    def record_computed(self, block_hash: bytes, parent_hash: bytes, depth: int = 0, tenant: str = "") -> PrefixBlock:
        """Record that a block was just computed, and return its record. A block that no request asked for counts as
        generated."""
        record = self._get_or_create(block_hash, parent_hash, depth, tenant)
        record.eviction, record.is_corrupt = None, False
        if not record.num_requests:
            record.num_requests = 1
            parent = self._records.get(parent_hash)
            if parent is not None:  # an answer inherits the retention of its prompt
                record.claims = parent.claims
            record.cohort = self.reuse_table.create_cohort(_GENERATED)
            self.reuse_table.add_block(record.cohort)
        return record

    def find_block(self, block_hash: bytes) -> PrefixBlock | None:
        """The record of a block that a tier holds, or of a ghost; None for other blocks."""
        return self._records.get(block_hash)

    def explain_miss(self, block_hash: bytes, index: int) -> PrefixMiss:
        """Why no tier holds the block, the `index`-th of a request's prompt."""
        record = self._records.get(block_hash)
        if record is None:
            return PrefixMiss(index, MissReason.NEVER_SEEN)
        if record.is_corrupt:
            return PrefixMiss(index, MissReason.CORRUPT)
        if record.eviction is not None:
            return PrefixMiss(index, MissReason.EVICTED, record.eviction, self.now - record.eviction.at)
        is_first = self._first_by_content.get(record.content, record) is record
        return PrefixMiss(index, MissReason.NEVER_SEEN if is_first else MissReason.OTHER_SALT)

    def idle_seconds(self, tenant: str) -> float:
        """Seconds since the tenant's last request."""
        return self.now - self._last_request_at.get(tenant, -math.inf)

    def check(self) -> None:
        """Raises AssertionError unless ghosts are within their limit and each cohort's `size` is right."""
        assert len(self._recent) <= self.max_ghosts, "too many ghosts"
        assert all(self._records[name] is record for name, record in self._recent.items()), "two records"
        sizes = Counter(id(record.cohort) for record in self._records.values() if record.cohort is not None)
        for record in self._records.values():
            cohort = record.cohort
            assert cohort is None or cohort.size == sizes[id(cohort)], "a cohort's size is not its number of blocks"

    def _get_or_create(self, block_hash: bytes, parent_hash: bytes, depth: int, tenant: str) -> PrefixBlock:
        record = self._records.get(block_hash)
        if record is None:
            record = self._records[block_hash] = PrefixBlock(block_hash, parent_hash, depth, tenant)
        self._recent[block_hash] = record
        self._recent.move_to_end(block_hash)
        if len(self._recent) > self.max_ghosts:
            _, forgotten = self._recent.popitem(last=False)
            if forgotten.cohort is not None:
                self.reuse_table.forget_block(forgotten.cohort)
                forgotten.cohort = None
        return record
