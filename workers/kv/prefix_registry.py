"""PrefixRegistry: what is known of every prefix block, held or not: where it hangs, whose it is, how it was wanted.

A block's record is one object for as long as any tier holds it, and stays for a bounded while after (a *ghost*), so
that a block that comes back is known again. Tiers keep the record beside the block and pass it on with it. Requests
are noted as they arrive, hit or miss, and the book's life table learns from them. It does not know where a block lies,
nor which goes next.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import EvictionMark, MissReason, PrefixMiss
from coatcheck.workers.kv.retention_claims import UNCLAIMED, RetentionClaims
from coatcheck.workers.kv.reuse_table import Cohort, ReuseTable

# Kinds of lives: blocks wanted once, twice ... ten times or more; and generated ones, wanted by nobody yet.
_MOST_WANTS: Final = 10
_GENERATED: Final = _MOST_WANTS
_MOST_TENANTS: Final = 4096


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prefix:
    """One block and all before it; `depth` is how many those are, `tenant` whose share they count towards.

    `wants` counts requests for it; `cohort` is the company in which it awaits the next. `claims` says how dearly it is
    to be kept, `evicted` how it left the last tier that held it. The rest explains misses: `content` numbers its tokens
    whatever the salt, `elsewhere` says that they had been asked for under another one before.
    """

    block_hash: bytes
    parent_hash: bytes
    depth: int = 0
    tenant: str = ""
    wants: int = 0
    cohort: Cohort | None = None
    claims: RetentionClaims = UNCLAIMED
    evicted: EvictionMark | None = None
    broken: bool = False
    content: int = 0
    elsewhere: bool = False


class PrefixRegistry:
    """`max_ghosts` records are kept that no tier holds, the last to be named or wanted."""

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.table = ReuseTable(_MOST_WANTS + 1)
        self._records: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, Prefix] = OrderedDict()  # what keeps a ghost alive
        self._contents: WeakValueDictionary[int, Prefix] = WeakValueDictionary()
        self._asked_at: OrderedDict[str, float] = OrderedDict()  # by tenant

    @property
    def now(self) -> float:
        """Seconds, by the clock of whoever calls `advance`."""
        return self.table.now

    def advance(self, now: float) -> None:
        """Time has passed."""
        self.table.advance(now)

    def want(
        self,
        hashes: Sequence[bytes],
        tenant: str = "",
        retention: Retention | None = None,
        contents: Sequence[int] = (),
    ) -> None:
        """A request asks for this chain, from its root; each request says so once, whatever is held of it."""
        self._asked_at[tenant] = self.now
        self._asked_at.move_to_end(tenant)
        if len(self._asked_at) > _MOST_TENANTS:
            self._asked_at.popitem(last=False)
        cohorts: dict[int, Cohort] = {}
        parent = b""
        for depth, block_hash in enumerate(hashes):
            record = self._record(block_hash, parent, depth, tenant)
            if record.cohort is not None:
                self.table.end(record.cohort)
            record.wants += 1
            kind = min(record.wants, _MOST_WANTS) - 1
            if (cohort := cohorts.get(kind)) is None:
                cohort = cohorts[kind] = self.table.begin(kind)
            self.table.join(cohort)
            record.cohort = cohort
            if retention is not None or record.claims is not UNCLAIMED:
                record.claims = record.claims.asked(retention, self.now)
            if depth < len(contents) and not record.content:
                self._note_content(record, contents[depth])
            parent = block_hash

    def name(self, block_hash: bytes, parent_hash: bytes, depth: int = 0, tenant: str = "") -> Prefix:
        """The record of a block that is computed now; unless a request has asked for it, it was generated."""
        record = self._record(block_hash, parent_hash, depth, tenant)
        record.evicted, record.broken = None, False
        if not record.wants:
            record.wants = 1
            parent = self._records.get(parent_hash)
            if parent is not None:  # retained as the prompt before it is
                record.claims = parent.claims
            record.cohort = self.table.begin(_GENERATED)
            self.table.join(record.cohort)
        return record

    def explain(self, block_hash: bytes, index: int) -> PrefixMiss:
        """Why a block that a request has asked for is held nowhere."""
        record = self._records.get(block_hash)
        if record is not None and record.broken:
            return PrefixMiss(index, MissReason.BROKEN)
        if record is not None and record.evicted is not None:
            return PrefixMiss(index, MissReason.EVICTED, record.evicted, self.now - record.evicted.at)
        elsewhere = record is not None and record.elsewhere
        return PrefixMiss(index, MissReason.OTHER_SALT if elsewhere else MissReason.NEVER_SEEN)

    def idle_seconds(self, tenant: str) -> float:
        """How long it has been since the tenant asked for anything."""
        return self.now - self._asked_at.get(tenant, -math.inf)

    def __len__(self) -> int:
        return len(self._records)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert len(self._recent) <= self.max_ghosts, "more ghosts than may be"
        assert all(self._records[block_hash] is record for block_hash, record in self._recent.items()), "two records"
        sizes = Counter(id(record.cohort) for record in self._records.values() if record.cohort is not None)
        for record in self._records.values():
            cohort = record.cohort
            assert cohort is None or cohort.size == sizes[id(cohort)], "a cohort has other members than it counts"

    def _record(self, block_hash: bytes, parent_hash: bytes, depth: int, tenant: str) -> Prefix:
        record = self._records.get(block_hash)
        if record is None:
            record = self._records[block_hash] = Prefix(block_hash, parent_hash, depth, tenant)
        self._recent[block_hash] = record
        self._recent.move_to_end(block_hash)
        if len(self._recent) > self.max_ghosts:
            self._forget(self._recent.popitem(last=False)[1])
        return record

    def _note_content(self, record: Prefix, content: int) -> None:
        record.content = content
        other = self._contents.get(content)
        record.elsewhere = other is not None and (other.block_hash != record.block_hash or other.elsewhere)
        self._contents[content] = record

    def _forget(self, record: Prefix) -> None:
        if record.cohort is not None:  # whether it would be wanted again is not learned any more
            self.table.leave(record.cohort)
            record.cohort = None
