"""RouterSet: the routers of a cluster: one anywhere, or one on each node that may have one, as nodes come and go.

All are told of every group and share nothing else. It does not know how groups come and go.
"""

import asyncio
import logging
import time

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.supervision.cluster_state import GroupState
from coatcheck.cluster.supervision.member_config import router_config
from coatcheck.cluster.supervision.router_supervisor import RouterSupervisor
from coatcheck.proto.errors import NotFound, Unavailable
from coatcheck.proto.plane_certificate import PlaneCertificate

_LOOK_SECONDS = 1.0
_REPORT_SECONDS = 1.5
_ATTACH_SECONDS = 10.0
_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class RouterSet:
    """`addresses` (gRPC's) and `http_addresses` are those of the routers that serve; `failure` why one never will.

    `has_served`: whether routers did so before this set's time.
    """

    def __init__(self, config: ServeConfig, plane: PlaneCertificate | None, *, has_served: bool) -> None:
        self._config = config
        self._plane = plane  # what they show groups, and which they believe
        self._has_served = has_served
        self._keepers: dict[str, RouterSupervisor] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._groups: list[GroupState] | None = None  # not yet known

    @property
    def addresses(self) -> list[str]:
        """host:port of each."""
        return [keeper.address for keeper in self._keepers.values() if keeper.address]

    @property
    def http_addresses(self) -> list[str]:
        """host:port of each that listens for HTTP."""
        return [keeper.http_address for keeper in self._keepers.values() if keeper.http_address]

    @property
    def is_whole(self) -> bool:
        """Whether all of them serve."""
        return bool(self._keepers) and len(self.addresses) == len(self._keepers)

    @property
    def failure(self) -> str:
        """Empty while there is hope."""
        return next((keeper.failure for keeper in self._keepers.values() if keeper.failure), "")

    async def keep(self) -> None:
        """Holds them up until cancelled."""
        try:
            if not self._config.router_per_node:
                self._add(launch.ROUTER, None)
                await asyncio.gather(*self._lives.values())
                return
            while True:
                await self._follow_nodes()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for life in self._lives.values():
                life.cancel()
            await asyncio.gather(*self._lives.values(), return_exceptions=True)

    def set_groups(self, states: list[GroupState]) -> None:
        """Sends the groups as they are now, without waiting for an answer."""
        self._groups = states
        for keeper in self._keepers.values():
            keeper.set_groups(states)

    async def drain(self) -> bool:
        """Lets no new request in and waits for those that run."""
        return all(await asyncio.gather(*(keeper.drain() for keeper in self._keepers.values())))

    async def wait_idle(self, group: str, seconds: float) -> None:
        """Until a group that takes no new work has none, as far as routers know, or the time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # A group reports its load once a second, and a router may have sent it something before it heard.
            await asyncio.sleep(min(_REPORT_SECONDS, seconds))
            if not any(await asyncio.gather(*(keeper.load(group) for keeper in self._keepers.values()))):
                return

    async def renew(self, address: str, drain_seconds: float) -> None:
        """Another process for the router at gRPC's `address`; see RouterSupervisor.renew. Raises NotFound."""
        keeper = next((keeper for keeper in self._keepers.values() if keeper.address == address), None)
        if keeper is None:
            raise NotFound(f"no router serves at {address}; there are {', '.join(self.addresses) or 'none'}")
        await keeper.renew(drain_seconds)

    async def misses(self) -> str:
        """Which group that serves a router does not use, and why; empty when every router answers and uses all."""
        serving = [state.name for state in self._groups or () if state.state == "serving"]
        for name, keeper in list(self._keepers.items()):
            missed = await keeper.misses(serving)
            if missed is None:
                return f"{name} does not answer"
            if missed:
                return missed
        return ""

    async def wait_used(self, group: str) -> None:
        """Until every router that answers uses a group that serves; raises Unavailable with the reason of one that
        does not."""
        deadline = time.monotonic() + _ATTACH_SECONDS
        for keeper in list(self._keepers.values()):
            while missed := await keeper.misses([group]):
                if time.monotonic() > deadline:
                    raise Unavailable(missed)
                await asyncio.sleep(_POLL_SECONDS)

    async def pressure(self) -> tuple[float, int]:
        """How long requests wait, at the router where they wait longest, and in how many groups something runs."""
        answers = await asyncio.gather(*(keeper.status() for keeper in self._keepers.values()))
        statuses = [status for status in answers if status is not None]
        busy = {group.name for status in statuses for group in status.groups if group.running or group.waiting}
        return max((status.queue_seconds for status in statuses), default=0.0), len(busy)

    async def stop(self, *, now: bool) -> None:
        """Ends all, first with a word (unless `now`), then without."""
        await asyncio.gather(*(keeper.stop(now=now) for keeper in self._keepers.values()))

    async def _follow_nodes(self) -> None:
        nodes = await asyncio.to_thread(launch.router_nodes, self._config.router_resource)
        wanted = {f"router-{id[:8]}": id for id in nodes}
        gone = [name for name in self._keepers if name not in wanted]
        for name in gone:
            _log.warning("%s is gone with its node", name)
            self._lives[name].cancel()
            await asyncio.gather(self._lives.pop(name), return_exceptions=True)
            await self._keepers.pop(name).stop(now=True)
        for name, id in wanted.items():
            if name not in self._keepers:
                self._add(name, id)

    def _add(self, name: str, node: str | None) -> None:
        # Where others serve, one that cannot is tried again, and keeps nobody from serving.
        has_served = self._has_served or any(keeper.has_served for keeper in self._keepers.values())
        config = router_config(self._config, name, self._config.grpc_port, self._plane)
        resource = None if node else self._config.router_resource
        keeper = RouterSupervisor(config, has_served=has_served, resource=resource, node=node)
        if self._groups is not None:
            keeper.set_groups(self._groups)
        self._keepers[name] = keeper
        self._lives[name] = asyncio.create_task(keeper.keep())
