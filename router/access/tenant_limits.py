"""TenantLimits: what each tenant may ask of this router a minute, in requests and in tokens.

Every router keeps its own. It does not know queues or groups.
"""

import time
from collections.abc import Callable

from coatcheck.proto.errors import Overloaded
from coatcheck.router.access.rate_limits import RateLimit
from coatcheck.router.access.tenant import Tenant


class TenantLimits:
    """Limits that change start anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: dict[tuple[str, str], RateLimit] = {}
        self.refused = 0

    def request(self, tenant: Tenant) -> None:
        """Counts one request; raises Overloaded, which says when to try again, where the tenant has had its share."""
        now = self._clock()
        for kind, limit in self._of(tenant, now):
            if seconds := limit.wait(now):
                self.refused += 1
                raise Overloaded(
                    f"{tenant.name!r} may have {limit.per_minute:g} {kind} a minute; try again in {seconds:.1f} s",
                    seconds,
                    "rate_limit",
                )
        for kind, limit in self._of(tenant, now):
            if kind == "requests":
                limit.take(1, now)

    def tokens(self, tenant: Tenant, count: int) -> None:
        """So many tokens more were sent or answered."""
        now = self._clock()
        for kind, limit in self._of(tenant, now):
            if kind == "tokens":
                limit.take(count, now)

    def _of(self, tenant: Tenant, now: float) -> list[tuple[str, RateLimit]]:
        found = []
        for kind, allowed in (("requests", tenant.requests_per_minute), ("tokens", tenant.tokens_per_minute)):
            if allowed is None:
                continue
            limit = self._limits.get((tenant.name, kind))
            if limit is None or limit.per_minute != allowed:
                limit = self._limits[tenant.name, kind] = RateLimit(allowed, now)
            found.append((kind, limit))
        return found
