"""RetentionClaims: what requests have asked about the keeping of one block, all of them together.

Requests that share a salt share blocks, and none undoes what another has asked: the highest claim whose time is not
over is in force, and behind it the next highest that lasts longer. That a block will not be wanted again (priority 0)
counts while nobody claims it, and until somebody asks for it after all. It does not know which block it is.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

from coatcheck.proto.retention import Retention


@dataclass(frozen=True, slots=True)
class RetentionClaims:
    """`kept`: (priority, until), the highest first, each of those behind it lasting longer."""

    kept: tuple[tuple[int, float], ...] = ()
    unwanted_until: float = 0.0

    def asked(self, retention: Retention | None, now: float) -> Self:
        """With what one more request asks, and without what is over."""
        if retention is not None and retention.priority == 0:
            return replace(self, unwanted_until=now + retention.ttl_seconds)
        if retention is None:
            return replace(self, unwanted_until=0.0)
        mine = retention.priority, now + retention.ttl_seconds
        kept: list[tuple[int, float]] = []
        for claim in sorted({*self.kept, mine}, reverse=True):
            if claim[1] > (kept[-1][1] if kept else now):
                kept.append(claim)
        return replace(self, kept=tuple(kept), unwanted_until=0.0)

    def in_force(self, now: float) -> tuple[int, float]:
        """(priority, until) of the claim that counts; priority 0 where there is none."""
        return next((claim for claim in self.kept if claim[1] > now), (0, 0.0))

    def is_unwanted(self, now: float) -> bool:
        """Whether the block may go before all others."""
        return self.unwanted_until > now and not self.in_force(now)[0]


UNCLAIMED: Final = RetentionClaims()
