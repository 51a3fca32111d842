"""Admin: what an operator asks of a router, as plain methods over its messages.

It does not know gRPC, and it changes nothing but who takes new work.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable

from ..proto.coatcheck_pb2 import CacheAudit, DrainRequest, DrainResponse, GroupStatus, StatusRequest, StatusResponse
from ..proto.errors import InvalidRequest, NotFound
from .admission import refuse_unknown_fields
from .config import RouterConfig
from .group_address import GroupAddress
from .group_link import GroupLink
from .groups import Groups
from .traffic import Traffic


class Admin:
    """Reads groups and traffic."""

    def __init__(self, config: RouterConfig, groups: Groups, traffic: Traffic) -> None:
        self._config = config
        self._groups = groups
        self._traffic = traffic

    async def status(self, message: StatusRequest) -> StatusResponse:
        """See `report`."""
        refuse_unknown_fields(message)
        return self.report()

    def report(self) -> StatusResponse:
        """Groups as they reported last, and latencies as measured here."""
        groups = [self._link_status(link) for link in self._groups.links]
        groups += [_address_status(absent, absent.state, absent.reason) for absent in self._groups.absent]
        groups.sort(key=lambda group: group.name)
        response = StatusResponse(
            router=self._config.name,
            state=self.state,
            groups=groups,
            ttft=self._traffic.ttft.status(),
            tpot=self._traffic.tpot.status(),
            active_streams=self._traffic.active,
            hit_ratio=self._traffic.hit_ratio,
        )
        if self._groups.model is not None:
            response.model.CopyFrom(self._groups.model)
        return response

    async def drain(self, message: DrainRequest) -> DrainResponse:
        """Stops new work to one group, or to all, and waits for what runs."""
        refuse_unknown_fields(message)
        timeout = message.timeout_seconds if message.HasField("timeout_seconds") else None
        if timeout is not None and not timeout >= 0:
            raise InvalidRequest(f"timeout_seconds is {timeout}; it must be at least 0")
        if not message.group:
            drained = await self.drain_router(timeout)
            return DrainResponse(drained=drained, remaining_streams=self._traffic.active)
        link = self._groups.link(message.group)
        if link is None:
            raise NotFound(f"there is no group {message.group!r}; `status` lists them")
        link.draining = True
        self._groups.notify()
        drained = await _finishes(link.tickets.idle(), timeout)
        return DrainResponse(drained=drained, remaining_streams=len(link.tickets))

    async def drain_router(self, timeout: float | None) -> bool:
        """Stops new work and waits until the last request ends; whether it did in time."""
        self._traffic.draining = True
        self._groups.notify()
        return await _finishes(self._traffic.idle(), timeout)

    @property
    def state(self) -> str:
        """ "serving", "draining" or "unavailable"."""
        if self._traffic.draining:
            return "draining"
        return "serving" if self._groups.serving() else "unavailable"

    def _link_status(self, link: GroupLink) -> GroupStatus:
        status = _link_status(link)
        audit = self._groups.audit.stats(link.name)
        status.audit.CopyFrom(CacheAudit(**dataclasses.asdict(audit)))
        return status


async def _finishes(waiting: Awaitable[None], timeout: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await waiting
    except TimeoutError:
        return False
    return True


def _link_status(link: GroupLink) -> GroupStatus:
    address = link.address
    if link.registration is None:
        # A supervisor that says "serving" does not know yet what this router has just found out.
        state = "lost" if address.state == "serving" and link.reason else "starting"
        return _address_status(address, state, link.reason or address.reason)
    status = _address_status(address, "draining" if link.draining else address.state, address.reason)
    if status.state == "starting":
        status.state = "serving"  # it has registered, so every rank has run a step
    reported = GroupStatus()
    reported.CopyFrom(link.load.last.status)
    for name in ("name", "state", "address", "restarts"):
        reported.ClearField(name)
    status.MergeFrom(reported)
    status.blocks_total = status.blocks_total or link.registration.num_blocks
    return status


def _address_status(address: GroupAddress, state: str, reason: str) -> GroupStatus:
    return GroupStatus(
        name=address.name,
        state=state,
        address=address.address,
        reason=reason,
        restarts=address.restarts,
    )
