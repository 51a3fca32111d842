"""TenantLimits: how many requests and tokens per minute each tenant may have from this router, as token buckets.

Each router counts for itself: with three routers a tenant may have up to three times its limits.
"""

import time
from collections.abc import Callable
from typing import Final

from coatcheck.proto.errors import Overloaded
from coatcheck.router.access.tenant import Tenant

_MINUTE: Final = 60.0


class TenantLimits:
    """One bucket per tenant and kind. Changing a limit resets its bucket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], RateLimit] = {}

    def charge_request(self, tenant: Tenant) -> None:
        """Counts one request. Raises Overloaded, with the seconds to wait, if a limit of the tenant is used up."""
        now = self._clock()
        requests = self._bucket(tenant, "requests", tenant.requests_per_minute, now)
        tokens = self._bucket(tenant, "tokens", tenant.tokens_per_minute, now)
        for kind, bucket in (("requests", requests), ("tokens", tokens)):
            if bucket is not None and (seconds := bucket.seconds_until_available(now)):
                raise Overloaded(
                    f"{tenant.name!r} may have {bucket.per_minute:g} {kind} a minute; try again in {seconds:.1f} s",
                    seconds,
                    "rate_limit",
                )
        if requests is not None:
            requests.consume(1, now)

    def charge_tokens(self, tenant: Tenant, count: int) -> None:
        """Counts `count` tokens of a prompt or an answer."""
        now = self._clock()
        bucket = self._bucket(tenant, "tokens", tenant.tokens_per_minute, now)
        if bucket is not None:
            bucket.consume(count, now)

    def _bucket(self, tenant: Tenant, kind: str, per_minute: float | None, now: float) -> "RateLimit | None":
        if per_minute is None:
            return None
        bucket = self._buckets.get((tenant.name, kind))
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[tenant.name, kind] = RateLimit(per_minute, now)
        return bucket


class RateLimit:
    """A token bucket that holds one minute's amount and is full at first.

    The amount that a request takes may be known only afterwards, so `consume` may bring the level below zero. Nothing
    is available then until the level is at least 1 again.
    """

    __slots__ = ("_level", "_updated_at", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = self._size
        self._updated_at = now

    def seconds_until_available(self, now: float) -> float:
        """0 if something is available now."""
        self._refill(now)
        return max(1.0 - self._level, 0.0) * _MINUTE / self.per_minute

    def consume(self, amount: float, now: float) -> None:
        """Takes `amount` from the bucket, which need not hold as much."""
        self._refill(now)
        self._level = min(self._level - amount, self._size)

    @property
    def _size(self) -> float:
        return max(self.per_minute, 1.0)  # a limit below one per minute still allows one at a time

    def _refill(self, now: float) -> None:
        elapsed = max(now - self._updated_at, 0.0)
        self._level = min(self._level + elapsed * self.per_minute / _MINUTE, self._size)
        self._updated_at = max(self._updated_at, now)
