"""GroupRegistry: the groups that this router knows, their links, and the prefix index that they feed.

The supervisor says which exist, the links find out which answer: together that is who takes new work. It does not know
requests, nor what sends them.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.eligibility import equal
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import Ejected, GroupFailures
from coatcheck.router.groups.outlier_detection import OutlierDetection
from coatcheck.router.routing.prefix_index import PrefixIndex


class GroupRegistry:
    """Owns the connections and the prefix index."""

    def __init__(self, config: RouterConfig) -> None:
        self.index = PrefixIndex()
        self.failures = GroupFailures()
        self.model: GetModelResponse | None = None  # of the last group that registered; it outlives the group
        # By name, so that a group that is lost and started again stays drained.
        self.draining: set[str] = set()
        self._config = config
        self._on_room: Callable[[], None] = lambda: None
        self._on_groups_changed: Callable[[], None] = lambda: None
        self._connections: dict[str, GroupConnection] = {}
        self._absent: dict[str, GroupEndpoint] = {}  # known, but with nothing to attach to
        self._serving_before: list[tuple[GroupConnection, Registration]] = []
        self._version = 0  # of the newest list
        self._changed = asyncio.Event()
        self._outliers = OutlierDetection()

    def set_listener(self, *, on_room: Callable[[], None], on_groups_changed: Callable[[], None]) -> None:
        """`on_room` is called whenever some group may have room for another request; `on_groups_changed` is called
        instead when the set of groups that take new work has changed."""
        self._on_room = on_room
        self._on_groups_changed = on_groups_changed

    @property
    def connections(self) -> Iterable[GroupConnection]:
        """One per group that has an address, attached or not."""
        return self._connections.values()

    @property
    def absent(self) -> Iterable[GroupEndpoint]:
        """Groups that are starting or lost."""
        return self._absent.values()

    def find_connection(self, name: str) -> GroupConnection | None:
        """By name; None for a group that has no connection."""
        return self._connections.get(name)

    async def set_endpoints(self, addresses: Sequence[GroupEndpoint], version: int = 0) -> None:
        """Replaces what the supervisor knows: links to new groups open, links to groups gone or lost close at once.

        A list older than the newest is ignored, since lists may overtake each other: versions grow, over a
        supervisor's restart too. 0 is always taken.
        """
        if version and version < self._version:
            return
        self._version = max(version, self._version)
        wanted = {address.name: address for address in addresses if address.address and address.state != "lost"}
        self._absent = {address.name: address for address in addresses if address.name not in wanted}
        self.draining &= {*wanted, *self._absent}
        closing = []
        for name, connection in list(self._connections.items()):
            if name not in wanted or wanted[name].address != connection.address.address:
                closing.append(self._connections.pop(name).close("its supervisor has taken it away"))
        for name, address in wanted.items():
            if name in self._connections:
                self._connections[name].address = address
            else:
                self._connections[name] = GroupConnection(
                    address,
                    self._config,
                    self.index,
                    self.failures,
                    on_change=self.notify,
                    on_room=self._notify_room,
                    detect_outlier=self._detect_outlier,
                )
        await asyncio.gather(*closing)
        for address in addresses:
            if address.predecessor is not None:
                self.failures.record_cause(address.name, address.incarnation - 1, address.predecessor)
        self.notify()

    async def close(self) -> None:
        """Ends every connection."""
        await self.set_endpoints([])

    @property
    def next_change(self) -> asyncio.Event:
        """Set once, when next a group comes or goes, somebody begins to drain, or a request is less of a suspect. Look
        after taking it, then wait."""
        return self._changed

    def serving(self) -> list[tuple[GroupConnection, Registration]]:
        """Groups that take new work."""
        return [
            (connection, connection.registration)
            for connection in self._connections.values()
            if connection.registration is not None
            and connection.name not in self.draining
            and connection.address.state != "draining"
        ]

    def notify(self) -> None:
        """Something about who takes new work has changed; wakes whoever waits for that."""
        serving = self.serving()
        for _, registration in serving:
            self.model = registration.model
        self._changed.set()
        self._changed = asyncio.Event()
        if not serving:
            for connection in self._connections.values():
                connection.recall()
        # A request whose suspicion falls notifies too, hundreds of them at once; the groups are the same then.
        same = serving == self._serving_before
        self._serving_before = serving
        (self._on_room if same else self._on_groups_changed)()

    def _notify_room(self) -> None:
        self._on_room()

    def _detect_outlier(self, connection: GroupConnection) -> Ejected | None:
        """Whether it is too slow, now that it has reported, to be kept beside the others."""
        status = connection.load.last.status
        if (
            connection.registration is None
            or not status.running
            or not self._outliers.is_far_beyond_usual(status.slowness)
        ):
            return None
        peers = [
            other.load.last.status.slowness
            for other, registration in self.serving()
            if other is not connection and equal(registration.model, connection.registration.model)
        ]
        return self._outliers.detect(connection.name, status.slowness, peers, asyncio.get_running_loop().time())
