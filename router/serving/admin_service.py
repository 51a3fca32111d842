"""AdminService: what an operator asks of a router, as plain methods over its messages.

It does not know gRPC, and it changes nothing but who takes new work.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from contextlib import suppress

from coatcheck.proto.contract import VERSION
from coatcheck.proto.errors import InvalidRequest, NotFound
from coatcheck.proto.stubs.coatcheck_pb2 import (
    CacheAudit,
    DrainRequest,
    DrainResponse,
    GroupStatus,
    StatusRequest,
    StatusResponse,
)
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.message_limits import check_parts
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from coatcheck.router.telemetry.traffic import Traffic


class AdminService:
    """Reads groups and traffic."""

    def __init__(
        self,
        config: RouterConfig,
        groups: GroupRegistry,
        dispatcher: Dispatcher,
        traffic: Traffic,
        metrics: RequestMetrics,
    ) -> None:
        self._config = config
        self._groups = groups
        self._dispatcher = dispatcher
        self._traffic = traffic
        self._metrics = metrics

    async def status(self, message: StatusRequest) -> StatusResponse:
        """See `report`."""
        check_parts(message)
        return self.report()

    def report(self) -> StatusResponse:
        """Groups as they reported last, and latencies as measured here."""
        response = self.counts()
        for name in ("ttft", "tpot", "itl", "queue"):
            getattr(response, name).CopyFrom(getattr(self._metrics, name).status())
        return response

    def counts(self) -> StatusResponse:
        """The same without latencies, whose percentiles take a while."""
        groups = [self._link_status(link) for link in self._groups.connections]
        groups += [_address_status(absent, absent.state, absent.reason) for absent in self._groups.absent]
        groups.sort(key=lambda group: group.name)
        response = StatusResponse(
            router=self._config.name,
            state=self.state,
            groups=groups,
            active_streams=self._traffic.active,
            hit_ratio=self._metrics.hit_ratio,
            version=VERSION,
            queue_seconds=self._dispatcher.queue.queue_seconds(asyncio.get_running_loop().time()),
        )
        if self._groups.model is not None:
            response.model.CopyFrom(self._groups.model)
        return response

    async def drain(self, message: DrainRequest) -> DrainResponse:
        """Stops new work to one group, or to all, and waits for what runs; or undoes it."""
        check_parts(message)
        timeout = message.timeout_seconds if message.HasField("timeout_seconds") else None
        if timeout is not None and not timeout >= 0:
            raise InvalidRequest(f"timeout_seconds is {timeout}; it must be at least 0")
        if timeout is not None and message.undo:
            raise InvalidRequest("timeout_seconds is for a drain, and undo waits for nothing; send one of them")
        if not message.group:
            if message.undo:
                self._traffic.is_draining = False
                self._groups.notify()
            drained = not message.undo and await self.drain_router(timeout)
            return DrainResponse(drained=drained, remaining_streams=self._traffic.active)
        drained = await self._drain_group(message.group, message.undo, timeout)
        link = self._groups.find_connection(message.group)
        return DrainResponse(drained=drained, remaining_streams=len(link.submissions) if link else 0)

    async def drain_router(self, timeout: float | None) -> bool:
        """Stops new work and waits until the last request ends; whether it did in time."""
        self._traffic.is_draining = True
        self._groups.notify()
        await self._wait(self._traffic.wait_until_idle(), lambda: self._traffic.is_draining, timeout)
        return self._traffic.is_draining and not self._traffic.active

    @property
    def state(self) -> str:
        """ "serving", "draining", "drained" or "unavailable"."""
        if self._traffic.is_draining:
            return "draining" if self._traffic.active else "drained"
        return "serving" if self._groups.serving() else "unavailable"

    def _link_status(self, link: GroupConnection) -> GroupStatus:
        status = _link_status(link, link.name in self._groups.draining)
        audit = self._groups.index.hit_prediction.stats(link.name)
        status.audit.CopyFrom(CacheAudit(**dataclasses.asdict(audit)))
        return status

    async def _drain_group(self, name: str, undo: bool, timeout: float | None) -> bool:
        draining, link = self._groups.draining, self._groups.find_connection(name)
        if link is None and all(absent.name != name for absent in self._groups.absent):
            raise NotFound(f"there is no group {name!r}; `status` lists them")
        (draining.discard if undo else draining.add)(name)
        self._groups.notify()
        if undo or link is None:
            return not undo
        await self._wait(link.submissions.wait_until_idle(), lambda: name in draining, timeout)
        return name in draining and not len(link.submissions)

    async def _wait(
        self, idle: Coroutine[None, None, None], draining: Callable[[], bool], timeout: float | None
    ) -> None:
        """Until nothing runs, the time is up, or the drain is undone."""
        ended = asyncio.ensure_future(idle)
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout(timeout):
                    while draining() and not ended.done():
                        change = asyncio.ensure_future(self._groups.next_change.wait())
                        try:
                            await asyncio.wait({ended, change}, return_when=asyncio.FIRST_COMPLETED)
                        finally:
                            change.cancel()
            finally:
                ended.cancel()


def _link_status(link: GroupConnection, draining: bool) -> GroupStatus:
    address = link.endpoint
    if link.registration is None:
        # A supervisor that says "serving" does not know yet what this router has just found out.
        state = "lost" if address.state == "serving" and link.reason else "starting"
        return _address_status(address, state, link.reason or address.reason)
    state = address.state
    if draining:
        state = "draining" if len(link.submissions) else "drained"
    # One that is back stays known for what it did, since it may do so again and again.
    ejected = f"serves again; ejections: {link.ejections}, the last for: {link.ejected}" if link.ejections else ""
    crashed = f"serves again; it had ended by itself: {address.predecessor}" if address.predecessor else ""
    status = _address_status(address, state, address.reason or ejected or crashed)
    if status.state == "starting":
        status.state = "serving"  # it has registered, so every rank has run a step
    reported = GroupStatus()
    reported.CopyFrom(link.load.last.status)
    for name in ("name", "state", "address", "restarts"):
        reported.ClearField(name)
    status.MergeFrom(reported)
    status.blocks_total = status.blocks_total or link.registration.num_blocks
    status.version = link.registration.version
    return status


def _address_status(address: GroupEndpoint, state: str, reason: str) -> GroupStatus:
    return GroupStatus(
        name=address.name,
        state=state,
        address=address.address,
        reason=reason,
        restarts=address.restarts,
    )
