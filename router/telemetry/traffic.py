"""Traffic: counts the open requests of this router, and refuses new ones while it drains."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from coatcheck.proto.errors import Draining, Overloaded
from coatcheck.router.access.tenant import ANONYMOUS, Tenant


class Traffic:
    """`active`: number of open requests. While `is_draining`, new requests are refused. While `will_drain`, they are
    accepted, but health says "draining"."""

    def __init__(self) -> None:
        self.active = 0
        self.is_draining = False
        self.will_drain = False
        self._streams: Counter[str] = Counter()  # open requests by tenant
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def count_request(self, tenant: Tenant = ANONYMOUS) -> Iterator[None]:
        """Counts a request while it is open. Raises Draining while new requests are refused, and Overloaded if the
        tenant has as many open requests as it may."""
        if self.is_draining:
            raise Draining("this router is draining and takes no new requests; send this one to another router")
        if tenant.max_streams is not None and self._streams[tenant.name] >= tenant.max_streams:
            raise Overloaded(
                f"{tenant.name!r} has {tenant.max_streams} requests open, its limit; try again when one ends",
                reason="too_many_streams",
            )
        self.active += 1
        self._streams[tenant.name] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            self._streams[tenant.name] -= 1
            if not self._streams[tenant.name]:
                del self._streams[tenant.name]
            if not self.active:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()
