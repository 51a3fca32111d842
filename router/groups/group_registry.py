"""GroupRegistry: the groups that this router knows, their connections, and the prefix index that they feed.

The supervisor says which groups exist, and the connections find out which of them answer.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.eligibility import are_compatible
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import GroupEjected, GroupFailures
from coatcheck.router.groups.outlier_detection import OutlierDetection
from coatcheck.router.routing.prefix_index import PrefixIndex


class GroupRegistry:
    """Owns the connections, the prefix index and the record of failures."""

    def __init__(self, config: RouterConfig) -> None:
        self.index = PrefixIndex()
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
        self._absent: dict[str, GroupEndpoint] = {}  # groups without an address
        self._serving_before: list[GroupConnection] = []
        self._version = 0  # of the newest list
        self._changed = asyncio.Event()
        self._outliers = OutlierDetection()

    @property
    def connections(self) -> Iterable[GroupConnection]:
        """One for each group that has an address, attached or not."""
        return self._connections.values()

    @property
    def absent(self) -> Iterable[GroupEndpoint]:
        """Groups that are starting or lost."""
        return self._absent.values()

    def find_connection(self, name: str) -> GroupConnection | None:
        """The connection to a group; None if the group is unknown or has no address."""
        return self._connections.get(name)

    async def set_endpoints(self, endpoints: Sequence[GroupEndpoint], version: int = 0) -> None:
        """Replaces the list of groups: opens connections to new groups, closes those to removed or lost ones.

        Lists may overtake each other, so a list with a lower `version` than the newest is ignored. A list with version
        0 is always used.
        """
        if version and version < self._version:
            return
        self._version = max(version, self._version)
        wanted = {endpoint.name: endpoint for endpoint in endpoints if endpoint.address and endpoint.state != "lost"}
        self._absent = {endpoint.name: endpoint for endpoint in endpoints if endpoint.name not in wanted}
        self.draining &= {*wanted, *self._absent}
        closing = []
        for name, connection in list(self._connections.items()):
            if name not in wanted or wanted[name].address != connection.endpoint.address:
                closing.append(self._connections.pop(name).close("the supervisor has removed or moved the group"))
        for name, endpoint in wanted.items():
            if name in self._connections:
                self._connections[name].endpoint = endpoint
            else:
                self._connections[name] = GroupConnection(
                    endpoint,
                    self._config,
                    self.index,
                    self.failures,
                    on_change=self.notify,
                    on_room=lambda: self.on_room(),
                    detect_outlier=self._detect_outlier,
                )
        await asyncio.gather(*closing)
        for endpoint in endpoints:
            if endpoint.previous_crash is not None:
                self.failures.record_cause(endpoint.name, endpoint.incarnation - 1, endpoint.previous_crash)
        self.notify()

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
        # With the same groups on_room suffices. This happens often: hundreds of requests may become less suspect at
        # once.
        same = serving == self._serving_before
        self._serving_before = serving
        if same:
            self.on_room()
        else:
            self.on_groups_changed()

    def _detect_outlier(self, connection: GroupConnection) -> GroupEjected | None:
        """Called after each load report; returns a GroupEjected if the group is much slower than its peers."""
        status = connection.load.last.status
        if not (connection.is_attached and status.running and self._outliers.is_far_beyond_usual(status.slowness)):
            return None
        peers = [
            other.load.last.status.slowness
            for other in self.serving()
            if other is not connection and are_compatible(other.model, connection.model)
        ]
        return self._outliers.detect(connection.name, status.slowness, peers, asyncio.get_running_loop().time())
