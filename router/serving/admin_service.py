"""AdminService: status and drain of a router, as methods over their messages."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress

from coatcheck.proto.contract import VERSION
from coatcheck.proto.errors import InvalidRequest, NotFound
from coatcheck.proto.stubs.coatcheck_pb2 import (
    DrainRequest,
    DrainResponse,
    GroupStatus,
    OutcomeCount,
    StatusRequest,
    StatusResponse,
)
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.message_limits import check_entries
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from coatcheck.router.telemetry.traffic import Traffic


class AdminService:
    """One for each router. `configuration`: see StatusResponse."""

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
        self.configuration = ""

    async def status(self, message: StatusRequest) -> StatusResponse:
        """The last reports of the groups, and the latencies of this router."""
        check_entries(message)
        return self.report()

    def report(self) -> StatusResponse:
        """As `status`, without a message."""
        response = self.counts()
        for name in ("ttft", "tpot", "itl", "queue"):
            getattr(response, name).CopyFrom(getattr(self._metrics, name).status())
        return response

    def counts(self) -> StatusResponse:
        """The status without latencies, whose percentiles take long to compute."""
        groups = [self._group_status(connection) for connection in self._groups.connections]
        groups += [
            _endpoint_status(endpoint, endpoint.state, endpoint.reason) for endpoint in self._groups.without_address
        ]
        groups.sort(key=lambda group: group.name)
        response = StatusResponse(
            router=self._config.name,
            state=self.state,
            groups=groups,
            active_streams=self._traffic.active,
            hit_ratio=self._metrics.hit_ratio,
            version=VERSION,
            routing=self._config.routing,
            configuration=self.configuration,
            queue_seconds=self._dispatcher.queue.queue_seconds(asyncio.get_running_loop().time()),
            queued_requests=len(self._dispatcher.queue),
            outcomes=[OutcomeCount(outcome=name, count=count) for name, count in self._metrics.outcomes.counts()],
        )
        if self._groups.model is not None:
            response.model.CopyFrom(self._groups.model)
        return response

    async def drain(self, message: DrainRequest) -> DrainResponse:
        """Stops new requests to one group or to the router, and waits for the open ones. With `undo`, allows new
        requests again."""
        check_entries(message)
        timeout = message.timeout_seconds if message.HasField("timeout_seconds") else None
        if timeout is not None and not timeout >= 0:
            raise InvalidRequest(f"timeout_seconds is {timeout}; it must be at least 0")
        if timeout is not None and message.undo:
            raise InvalidRequest("timeout_seconds is for a drain, and undo waits for nothing; send one of them")
        if not message.group:
            if message.undo:
                self.undo_router_drain()
            drained = not message.undo and await self.drain_router(timeout)
            return DrainResponse(drained=drained, remaining_streams=self._traffic.active)
        drained = await self._drain_group(message.group, message.undo, timeout)
        connection = self._groups.find_connection(message.group)
        return DrainResponse(drained=drained, remaining_streams=len(connection.submissions) if connection else 0)

    def announce_drain(self) -> None:
        """Makes the status "draining" and gRPC health NOT_SERVING. New requests are still accepted, so that load
        balancers have time to stop sending them."""
        self._traffic.will_drain = True
        self._groups.notify()

    async def drain_router(self, timeout: float | None) -> bool:
        """Refuses new requests and waits for the open ones; returns whether all of them ended in time."""
        self._traffic.is_draining = True
        self._groups.notify()
        await self._wait(self._traffic.wait_until_idle(), lambda: self._traffic.is_draining, timeout)
        return self._traffic.is_draining and not self._traffic.active

    def undo_router_drain(self) -> None:
        """Ends `announce_drain` and `drain_router`: new requests are allowed again."""
        self._traffic.is_draining = self._traffic.will_drain = False
        self._groups.notify()

    def reset_prefix_caches(self) -> list[str]:
        """Tells all attached groups to evict the blocks that no running request uses. Returns the groups' names."""
        attached = [connection for connection in self._groups.connections if connection.is_attached]
        for connection in attached:
            connection.reset_prefix_cache()
        return sorted(connection.name for connection in attached)

    @property
    def open_requests(self) -> int:
        """Requests that this router has open."""
        return self._traffic.active

    @property
    def state(self) -> str:
        """ "serving", "draining", "drained" or "unavailable"."""
        if self._traffic.is_draining:
            return "draining" if self._traffic.active else "drained"
        if self._traffic.will_drain:
            return "draining"
        return "serving" if self._groups.serving() else "unavailable"

    def _group_status(self, connection: GroupConnection) -> GroupStatus:
        status = _connection_status(connection, connection.name in self._groups.draining)
        status.audit.CopyFrom(self._groups.index.hit_prediction.audits[connection.name])
        return status

    async def _drain_group(self, name: str, undo: bool, timeout: float | None) -> bool:
        draining, connection = self._groups.draining, self._groups.find_connection(name)
        if connection is None and all(endpoint.name != name for endpoint in self._groups.without_address):
            raise NotFound(f"there is no group {name!r}; `coatcheck status` lists them")
        (draining.discard if undo else draining.add)(name)
        self._groups.notify()
        if undo or connection is None:
            return not undo
        await self._wait(connection.submissions.wait_until_idle(), lambda: name in draining, timeout)
        return name in draining and not len(connection.submissions)

    async def _wait(
        self, idle: Coroutine[None, None, None], draining: Callable[[], bool], timeout: float | None
    ) -> None:
        """Waits until `idle` returns, `timeout` seconds are over, or the drain is undone."""
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


def _connection_status(connection: GroupConnection, is_draining: bool) -> GroupStatus:
    endpoint = connection.endpoint
    if not connection.is_attached:
        # This router may know that the group is lost before the supervisor does.
        state = "lost" if endpoint.state == "serving" and connection.detach_reason else "starting"
        return _endpoint_status(endpoint, state, connection.detach_reason or endpoint.reason)
    state = endpoint.state
    if is_draining:
        state = "draining" if len(connection.submissions) else "drained"
    # Shown also after the group is attached again, because a group may be ejected again and again.
    ejected = (
        f"serves again; ejections: {connection.ejections}, the last for: {connection.last_ejection}"
        if connection.ejections
        else ""
    )
    restarted = f"serves again; last restart: {endpoint.last_failure}" if endpoint.last_failure else ""
    status = _endpoint_status(endpoint, state, endpoint.reason or ejected or restarted)
    if status.state == "starting":
        status.state = "serving"  # the group has registered, so every rank has run a step
    reported = GroupStatus()
    reported.CopyFrom(connection.load.last_report.status)
    for name in ("name", "state", "address", "restarts"):
        reported.ClearField(name)
    status.MergeFrom(reported)
    status.blocks_total = status.blocks_total or connection.registration.num_blocks
    status.version = connection.registration.version
    return status


def _endpoint_status(endpoint: GroupEndpoint, state: str, reason: str) -> GroupStatus:
    return GroupStatus(
        name=endpoint.name,
        state=state,
        address=endpoint.address,
        reason=reason,
        restarts=endpoint.restarts,
    )
