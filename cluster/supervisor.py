"""Supervisor: a detached Ray actor that keeps the routers and the groups running.

Ray starts it again when it dies, with the arguments of its first start; it then adopts what still runs. It tells every
router of each change in a group at once. It does not know tokens, nor who reads its state.
"""

import asyncio
import logging
import os

import ray
from ray.util.placement_group import PlacementGroup

from ..proto.errors import InvalidConfig, NotFound, Unavailable
from ..proto.log_lines import configure_logging
from . import launch
from .authority import Plane
from .cluster_state import ClusterState
from .config import ServeConfig
from .group_keeper import GroupKeeper
from .placement import Placement
from .rank_hosts import RankHosts
from .router_set import RouterSet

_RESERVE_SECONDS = 60

_log = logging.getLogger(__name__)


class Supervisor:
    """Every method answers at once, but for `drain`, `restart…` and `stop`."""

    # Ray awaits an async actor's constructor in the loop of its methods, also when it starts the actor again.
    async def __init__(self, config: ServeConfig, placement: Placement, plane: Plane) -> None:  # type: ignore[misc]
        configure_logging(config.log_format, actor="supervisor")
        self._config = config
        self._placement = placement
        self._plane = plane
        self._groups: list[GroupKeeper] = []
        self._reserved: list[PlacementGroup] = []
        self._hosts = RankHosts()
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._routers = RouterSet(config, plane.router, has_served=self._is_restarted)
        self._failure = ""
        self._life = asyncio.create_task(self._supervise())

    async def config(self) -> ServeConfig:
        """What this cluster was asked to be."""
        return self._config

    async def state(self) -> ClusterState:
        """How far everything is."""
        groups = tuple(keeper.state for keeper in self._groups)
        failed = next((group.reason for group in groups if group.state == "failed"), "")
        failure = self._failure or self._routers.failure or failed
        routers = tuple(self._routers.addresses) if self._routers.is_whole else ()
        return ClusterState(groups, routers, failure, tuple(self._routers.http_addresses))

    async def drain(self) -> bool:
        """Lets no new request in and waits for those that run."""
        return await self._routers.drain()

    async def restart(self, group: str, drain_seconds: float) -> None:
        """New processes for one group, of whatever is installed now: no new work goes to it, what runs may end within
        that time, and the rest moves. Returns once every router uses it; raises Unavailable when it does not come up
        or a router does not take it, and NotFound for no such group."""
        keeper = next((keeper for keeper in self._groups if keeper.state.name == group), None)
        if keeper is None:
            raise NotFound(f"there is no group {group!r}; there are {', '.join(self._config.group_names)}")
        if not any(other.state.state == "serving" for other in self._groups if other is not keeper):
            raise Unavailable(f"no group but {group} serves, and requests would be refused; wait, or add a group")
        keeper.drain()
        await self._routers.wait_idle(group, drain_seconds)
        await keeper.renew()
        await self._routers.wait_used(group)

    async def restart_router(self, address: str, drain_seconds: float) -> None:
        """The same for the router at gRPC's `address`, but that new requests must go to others meanwhile."""
        await self._routers.renew(address, drain_seconds)

    async def restart_supervisor(self) -> None:
        """Never answers: Ray starts the next one, of whatever is installed now, and that adopts what runs."""
        os._exit(1)

    async def stop(self, *, now: bool = False) -> None:
        """Ends the routers and every rank, and gives their places back; the actor itself is for the caller to end."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await asyncio.gather(self._routers.stop(now=now), *(keeper.stop(now=now) for keeper in self._groups))
        for reserved in self._reserved:
            ray.util.remove_placement_group(reserved)

    async def _supervise(self) -> None:
        try:
            # A router's start needs no group: its process comes up beside theirs.
            async with asyncio.TaskGroup() as lives:
                lives.create_task(self._routers.keep())
                await self._reserve()
                # All are known before a router hears of any, so that it drops none that a restart has found running.
                await asyncio.gather(*(keeper.adopt() for keeper in self._groups))
                self._tell_routers()
                for keeper in self._groups:
                    lives.create_task(keeper.keep())
        except* Exception as errors:
            _log.exception("the supervisor's own work has failed")
            self._failure = str(errors.exceptions[0])
            if any(keeper.state.state == "serving" for keeper in self._groups):
                os._exit(1)  # Ray starts it again, and it adopts what runs: better than nobody watching

    async def _reserve(self) -> None:
        """A place for every group, those that need a whole node first."""
        config, placement = self._config, self._placement
        places = list(zip(config.group_names, placement.strategies, strict=True))
        for name, strategy in places:
            reserved = launch.reserve(name, placement.bundle, strategy, config.tp)
            # One that has served waits for its place with its keeper: a node may be gone, and others go on meanwhile.
            if not self._is_restarted and not await asyncio.to_thread(reserved.wait, _RESERVE_SECONDS):
                raise InvalidConfig(self._no_place(name, strategy))
            self._reserved.append(reserved)
            self._hosts.note(name, launch.hosts_of(reserved))
        self._groups = [
            GroupKeeper(
                launch.group_config(config, name, placement, self._plane.group),
                reserved,
                self._hosts,
                loopback=config.ray_address is None,
                has_served=self._is_restarted,
                on_change=self._tell_routers,
            )
            for name, reserved in zip(config.group_names, self._reserved, strict=True)
        ]

    def _no_place(self, name: str, strategy: str) -> str:
        needs = ", ".join(f"{self._config.tp * amount:g} {kind}" for kind, amount in self._placement.bundle.items())
        where = "on one node" if strategy == "STRICT_PACK" else "over its nodes"
        return (
            f"Ray found no place for {name} in {_RESERVE_SECONDS} s: it needs {needs} free {where}; "
            "see `ray status` for who else holds them"
        )

    def _tell_routers(self) -> None:
        self._routers.set_groups([keeper.state for keeper in self._groups])
