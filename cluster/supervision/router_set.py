"""RouterSet: the routers of a cluster: one on any node, or one on each node, as nodes join and leave the Ray cluster.

Every router gets the same list of groups, and the same key for resume tickets. Routers share nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from coatcheck.cluster.config.derived_config import router_config
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.ray_cluster.cluster_state import GroupState, RouterState
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.router_supervisor import RouterSupervisor
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList
from coatcheck.proto.errors import NotFound, Unavailable
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.config import RouterConfig

_WATCH_SECONDS = 0.5  # between two looks at a router
_NODE_SECONDS = 1.0  # between two reads of the cluster's nodes
_LOAD_SECONDS = 1.5  # groups report their load once a second
_CONNECT_SECONDS = 10.0
# The chart's readiness probe takes a router out of the Service after three failures in a row, which take 6 s, and puts
# it back within 2 s. Load balancers outside of Kubernetes probe about as often.
_ANNOUNCE_SECONDS = 10.0
_RETURN_SECONDS = 5.0
_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class RouterSet:
    """All routers of a cluster. `has_served`: routers served under a former supervisor; each listens at the same
    ports again."""

    def __init__(
        self, config: ServeConfig, certificate: ClusterCertificate | None, resume_key: bytes = b"", *, has_served: bool
    ) -> None:
        self._config = config
        self._certificate = certificate  # for connections to groups
        self._resume_key = resume_key
        self._has_served = has_served
        self._supervisors: dict[str, RouterSupervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._groups: list[GroupState] = []
        self._group_list = VersionedGroupList()
        self._poll_interval = PollInterval(_WATCH_SECONDS)
        self._configuration = ""
        self._knows_nodes = False
        self._restart_lock = asyncio.Lock()

    @property
    def addresses(self) -> list[str]:
        """host:port of gRPC, of each router that serves."""
        return [router.address for router in self._supervisors.values() if router.address]

    @property
    def http_addresses(self) -> list[str]:
        """host:port of HTTP, of each router that serves HTTP."""
        return [router.http_address for router in self._supervisors.values() if router.http_address]

    @property
    def states(self) -> tuple[RouterState, ...] | None:
        """The state of each router; None until the nodes are known."""
        return tuple(router.state for router in self._supervisors.values()) if self._knows_nodes else None

    @property
    def all_serve(self) -> bool:
        return bool(self._supervisors) and len(self.addresses) == len(self._supervisors)

    @property
    def failure(self) -> str:
        """Why a router will never serve; "" if all may."""
        return next((router.failure for router in self._supervisors.values() if router.failure), "")

    async def supervise_routers(self, tasks: asyncio.TaskGroup) -> None:
        """Supervise each router in a task of `tasks`. With a router on each node, runs until cancelled."""
        if not self._config.router_per_node:
            self._add_router(tasks, launch.ROUTER, None)
            self._knows_nodes = True
            return
        while True:
            await self._follow_nodes(tasks)
            await asyncio.sleep(_NODE_SECONDS)

    def set_groups(self, states: list[GroupState]) -> None:
        """Send the changes to every router. `states`: the states of all groups. Does not wait for answers."""
        self._groups = states
        if self._group_list.set_states(states):
            for router in self._supervisors.values():
                router.send_groups()

    def set_config(self, config: ServeConfig) -> None:
        """Start routers with these settings from now on. Routers that run keep theirs until they start again."""
        self._config = config
        for name, router in self._supervisors.items():
            router.set_config(self._router_config(name))

    def set_configuration(self, text: str) -> None:
        """Make `text` the StatusResponse.configuration of every router. Does not wait for answers."""
        self._configuration = text
        for router in self._supervisors.values():
            router.set_configuration(text)

    async def drain_routers(self) -> bool:
        """Refuse new requests and wait for the running ones. Returns whether every router is drained."""
        return all(await asyncio.gather(*(router.drain_router() for router in self._supervisors.values())))

    async def restart_router(self, address: str, drain_seconds: float) -> None:
        """Restart the router whose gRPC address is `address`; see RouterSupervisor. Raises NotFound and Unavailable.

        Returns once the new process uses every serving group, or after 10 s. If there are other routers, this takes up
        to 15 s more: before the drain, load balancers get time to stop sending requests to this router; at the end,
        time to send requests to it again, before the caller restarts another router. One restart runs at a time: two
        routers that drain together may leave no router for new requests.
        """
        async with self._restart_lock:
            await self._restart_router(address, drain_seconds)

    async def wait_until_idle(self, group: str, seconds: float) -> None:
        """Wait until no router counts a request on a draining group, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # Wait first: a router may have sent requests just before it learned that the group drains, and the load
            # report that counts them comes later.
            await asyncio.sleep(min(_LOAD_SECONDS, seconds))
            if group not in busy_groups(await self._read_statuses()):
                return

    async def wait_until_connected(self, group: str) -> None:
        """Wait until every router that answers is connected to `group`. Raises Unavailable, with one router's reason,
        after 10 s."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while reason := missing_connection(await self._read_statuses(), [group]):
            if time.monotonic() > deadline:
                raise Unavailable(reason)
            await asyncio.sleep(_POLL_SECONDS)

    async def find_missing_connection(self) -> str:
        """A clause that names a router that does not answer, or that is not connected to a serving group; "" if all
        routers are connected to all serving groups."""
        statuses = await self._read_statuses()
        silent = next((f"{name} does not answer" for name, status in statuses.items() if status is None), "")
        return silent or missing_connection(statuses, self._serving())

    async def find_router_without(self, groups: Sequence[str]) -> str:
        """A router that sends no requests to any of the serving `groups`, because `coatcheck drain` told it so; "" if
        there is none. Ignores routers that do not answer."""
        statuses = await self._read_statuses()
        return next((name for name, status in statuses.items() if has_drained_all(status, groups)), "")

    def missing_groups(self) -> set[str]:
        """The serving groups to which some router is not connected, by the last reports of the routers."""
        return {name for router in self._supervisors.values() for name in router.missing_groups}

    async def measure_queue(self) -> tuple[float, int]:
        """(longest queue time of any router in seconds, number of groups that have requests)."""
        statuses = await self._read_statuses()
        longest = max((status.queue_seconds for status in statuses.values() if status), default=0.0)
        return longest, len(busy_groups(statuses))

    async def stop_routers(self, *, now: bool) -> None:
        """End every router. `now`: kill them at once."""
        await asyncio.gather(*(router.stop_router(now=now) for router in self._supervisors.values()))
        for router in self._supervisors.values():
            router.forget_ports()

    async def _restart_router(self, address: str, drain_seconds: float) -> None:
        name = next((name for name, router in self._supervisors.items() if router.address == address), None)
        if name is None:
            raise NotFound(f"no router serves at {address}; there are {', '.join(self.addresses) or 'none'}")
        router = self._supervisors[name]
        has_others = len(self._supervisors) > 1
        await router.restart_router(drain_seconds, _ANNOUNCE_SECONDS if has_others else 0.0)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while reason := missing_connection({name: await router.read_status()}, self._serving()):
            if time.monotonic() > deadline:
                _log.warning("after its restart %s", reason)
                break
            await asyncio.sleep(_POLL_SECONDS)
        if has_others:
            await asyncio.sleep(_RETURN_SECONDS)

    def _serving(self) -> list[str]:
        return [state.name for state in self._groups if state.state == "serving"]

    async def _read_statuses(self) -> dict[str, StatusResponse | None]:
        """The status of each router, by name; None for a router that does not answer."""
        routers = dict(self._supervisors)
        answers = await asyncio.gather(*(router.read_status() for router in routers.values()))
        return dict(zip(routers, answers, strict=True))

    async def _follow_nodes(self, tasks: asyncio.TaskGroup) -> None:
        nodes = await asyncio.to_thread(launch.router_nodes, self._config.router_resource)
        wanted = {f"router-{id[:8]}": id for id in nodes}
        for name in [name for name in self._supervisors if name not in wanted]:
            _log.warning("%s is gone with its node", name)
            self._tasks[name].cancel()
            await asyncio.gather(self._tasks.pop(name), return_exceptions=True)
            router = self._supervisors.pop(name)
            self._poll_interval.actors = len(self._supervisors)
            await router.remove_router()
        for name, id in wanted.items():
            if name not in self._supervisors:
                self._add_router(tasks, name, id)
        self._knows_nodes = True

    def _add_router(self, tasks: asyncio.TaskGroup, name: str, node: str | None) -> None:
        # Once any router has served, a router that cannot start is retried and does not fail the cluster.
        has_served = self._has_served or any(router.has_served for router in self._supervisors.values())
        config = self._router_config(name)
        resource = None if node else self._config.router_resource
        router = RouterSupervisor(
            config, self._group_list, self._poll_interval, has_served=has_served, resource=resource, node=node
        )
        if self._has_served:
            router.restore_ports()
        router.set_configuration(self._configuration)
        self._supervisors[name] = router
        self._poll_interval.actors = len(self._supervisors)
        self._tasks[name] = tasks.create_task(router.supervise_router())

    def _router_config(self, name: str) -> RouterConfig:
        return router_config(self._config, name, self._config.grpc_port, self._certificate, self._resume_key)


def busy_groups(statuses: Mapping[str, StatusResponse | None]) -> set[str]:
    """The groups that have running or waiting requests, as far as the routers know."""
    known = [group for status in statuses.values() if status for group in status.groups]
    return {group.name for group in known if group.running or group.waiting}


def has_drained_all(status: StatusResponse | None, groups: Sequence[str]) -> bool:
    """Whether a router's status reports each of these groups as draining or drained."""
    states = {group.name: group.state for group in status.groups} if status else {}
    return all(states.get(name) in ("draining", "drained") for name in groups)


def missing_connection(statuses: Mapping[str, StatusResponse | None], groups: Sequence[str]) -> str:
    """A clause that names a router that is not connected to one of `groups`, and the reason; "" if there is none.
    Ignores routers that do not answer."""
    for router, status in statuses.items():
        known = {group.name: group for group in status.groups} if status else {}
        for name in groups if status else ():
            if name not in known:
                return f"{router} does not know {name}"
            if known[name].state not in ("serving", "draining", "drained"):
                return f"{router} does not use {name}: {known[name].reason or f'it is {known[name].state}'}"
    return ""
