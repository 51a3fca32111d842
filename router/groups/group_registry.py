"""GroupRegistry: the groups that this router knows, their connections, and the prefix index that they feed.

The supervisor sends the list of groups that exist; the connections find out which of these groups answer.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import GroupEjected, GroupFailures
from coatcheck.router.groups.group_list import NO_LIST, GroupListUpdate, GroupListVersion
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.groups.outlier_detection import OutlierDetection
from coatcheck.router.routing.prefix_index import PrefixIndex


class GroupRegistry:
    """Owns the connections, the prefix index, the table of loads and the record of failures."""

    def __init__(self, config: RouterConfig) -> None:
        self.index = PrefixIndex()
        self.loads = LoadTable()
        self.failures = GroupFailures()
        self.model: GetModelResponse | None = None  # of the last group that registered, even after it is lost
        # Names, so that a group that is lost and started again stays drained.
        self.draining: set[str] = set()
        self._config = config
        # Called whenever some group may have room for another request.
        self.on_room: Callable[[], None] = lambda: None
        # Called instead when the set of groups that take new requests has changed.
        self.on_groups_changed: Callable[[], None] = lambda: None
        self._connections: dict[str, GroupConnection] = {}
        self._without_address: dict[str, GroupEndpoint] = {}
        self._serving_before: list[GroupConnection] = []
        self.version = NO_LIST  # of the supervisor's list; other threads may read it
        self._changed = asyncio.Event()
        self._outliers = OutlierDetection()

    @property
    def connections(self) -> Iterable[GroupConnection]:
        """One for each group that has an address, attached or not."""
        return self._connections.values()

    @property
    def without_address(self) -> Iterable[GroupEndpoint]:
        """Groups to which there is no connection, because they are starting or lost."""
        return self._without_address.values()

    def find_connection(self, name: str) -> GroupConnection | None:
        """The connection to a group; None if the group is unknown or has no address."""
        return self._connections.get(name)

    @property
    def unattached(self) -> tuple[str, ...]:
        """Names of the groups that are serving by the supervisor's list but not attached. Thread-safe."""
        connections = list(self._connections.values())  # one operation for other threads
        return tuple(
            connection.name
            for connection in connections
            if connection.endpoint.state == "serving" and not connection.is_attached
        )

    async def apply_update(self, update: GroupListUpdate) -> GroupListVersion:
        """Applies an update of the supervisor if it belongs to the list that this router holds. Returns the version of
        the list that it holds now. The list is changed before the first await."""
        if update.applies_to(self.version):
            self.version = update.version
            if update.base is None:
                await self.set_endpoints(update.endpoints)
            else:
                await self._change_endpoints(update.endpoints, update.removed)
        return self.version

    async def set_endpoints(self, endpoints: Sequence[GroupEndpoint]) -> None:
        """Replaces the list of groups: opens connections to new groups, closes those to removed or lost ones."""
        names = {endpoint.name for endpoint in endpoints}
        known = (*self._connections, *self._without_address)
        await self._change_endpoints(endpoints, [name for name in known if name not in names])

    async def close(self) -> None:
        """Ends every connection."""
        await self.set_endpoints([])

    @property
    def next_change(self) -> asyncio.Event:
        """Set when a group next attaches, is lost or is drained, and when a request becomes less suspect. Get the event
        first, then look at the groups, then wait for it."""
        return self._changed

    def serving(self) -> list[GroupConnection]:
        """The groups that take new requests."""
        return [
            connection
            for connection in self._connections.values()
            if connection.is_attached
            and connection.name not in self.draining
            and connection.endpoint.state != "draining"
        ]

    def notify(self) -> None:
        """Sets `next_change` and tells the listener, because the groups that take new requests may have changed."""
        serving = self.serving()
        if serving:
            self.model = serving[-1].model
        self._changed.set()
        self._changed = asyncio.Event()
        if not serving:
            for connection in self._connections.values():
                connection.end_ejection_pause()
        # If the set of groups is the same, on_room suffices. This is frequent: hundreds of requests may become less
        # suspect at once.
        same = serving == self._serving_before
        self._serving_before = serving
        if same:
            self.on_room()
        else:
            self.on_groups_changed()

    async def _change_endpoints(self, endpoints: Sequence[GroupEndpoint], removed: Sequence[str]) -> None:
        for name in removed:
            if (connection := self._connections.get(name)) is not None:
                # The supervisor removes a group only on purpose, so the loss says nothing about the group's requests.
                connection.endpoint = replace(connection.endpoint, state="draining")
        closing = [self._disconnect(name) for name in removed]
        for name in removed:
            self._without_address.pop(name, None)
            self.draining.discard(name)
        for endpoint in endpoints:
            name = endpoint.name
            connection = self._connections.get(name)
            if not endpoint.address or endpoint.state == "lost":
                closing.append(self._disconnect(name))
                self._without_address[name] = endpoint
                continue
            self._without_address.pop(name, None)
            if connection is not None and connection.endpoint.address == endpoint.address:
                connection.endpoint = endpoint
            else:
                closing.append(self._disconnect(name))
                self._connections[name] = self._connect(endpoint)
        await asyncio.gather(*filter(None, closing))
        for endpoint in endpoints:
            if endpoint.previous_crash is not None:
                self.failures.record_cause(endpoint.name, endpoint.incarnation - 1, endpoint.previous_crash)
        self.notify()

    def _disconnect(self, name: str) -> Coroutine[None, None, None] | None:
        """Forgets the connection to a group; returns what closes it, None if there is none."""
        connection = self._connections.pop(name, None)
        return connection.close("the supervisor has removed or moved the group") if connection is not None else None

    def _connect(self, endpoint: GroupEndpoint) -> GroupConnection:
        return GroupConnection(
            endpoint,
            self._config,
            self.index,
            self.loads,
            self.failures,
            on_change=self.notify,
            on_room=lambda: self.on_room(),
            detect_outlier=self._detect_outlier,
        )

    def _detect_outlier(self, connection: GroupConnection) -> GroupEjected | None:
        """Called after each load report; returns a GroupEjected if the group is much slower than its peers."""
        status = connection.load.last_report.status
        if not (connection.is_attached and status.running and self._outliers.is_far_beyond_usual(status.slowness)):
            return None
        peers = [
            other.load.last_report.status.slowness
            for other in self.serving()
            if other is not connection and other.group_kind == connection.group_kind
        ]
        return self._outliers.detect(connection.name, status.slowness, peers, asyncio.get_running_loop().time())
