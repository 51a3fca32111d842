"""Supervisor: a detached Ray actor that keeps the routers and the groups running.

Ray starts it again when it dies, with the arguments of its first start; it then adopts what still runs. It tells every
router of each change in a group at once. It does not know tokens, nor who reads its state.
"""

import asyncio
import logging
import os

import ray

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.ray_cluster.cluster_ca import PlaneCertificates
from coatcheck.cluster.ray_cluster.rank_placement import RankPlacement
from coatcheck.cluster.supervision.autoscale_rule import AutoscaleRule
from coatcheck.cluster.supervision.autoscaler import Autoscaler
from coatcheck.cluster.supervision.cluster_state import ClusterState
from coatcheck.cluster.supervision.group_set import GroupSet
from coatcheck.cluster.supervision.router_set import RouterSet
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.log_lines import configure_logging

_log = logging.getLogger(__name__)


class Supervisor:
    """Every method answers at once, but for `drain`, `restart…`, `scale` and `stop`.

    Ray ends the process of an actor when a caller asks for a method that the actor lacks. A release that adds a method
    here therefore raises CONTRACT.
    """

    # Ray awaits an async actor's constructor in the loop of its methods, also when it starts the actor again.
    async def __init__(self, config: ServeConfig, placement: RankPlacement, plane: PlaneCertificates) -> None:  # type: ignore[misc]
        configure_logging(config.log_format, actor="supervisor")
        self._config = config
        self._placement = placement
        self._plane = plane
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._routers = RouterSet(config, plane.router, has_served=is_restarted)
        self._groups = GroupSet(
            config,
            placement,
            plane.group,
            is_restarted=is_restarted,
            on_change=self._tell_routers,
            wait_idle=self._routers.wait_idle,
            wait_used=self._routers.wait_used,
        )
        self._failure = ""
        self._life = asyncio.create_task(self._supervise())

    async def config(self) -> ServeConfig:
        """What this cluster was asked to be, with as many groups as it is to have by now."""
        return self._config.model_copy(update={"groups": self._groups.size})

    async def state(self) -> ClusterState:
        """How far everything is."""
        groups = tuple(self._groups.states)
        failure = self._failure or self._routers.failure or self._groups.failure
        routers = tuple(self._routers.addresses) if self._routers.is_whole else ()
        return ClusterState(groups, routers, failure, tuple(self._routers.http_addresses), CONTRACT, VERSION)

    async def misses(self) -> str:
        """See RouterSet.misses: while it says something, clients may be refused for want of that group."""
        return await self._routers.misses()

    async def drain(self) -> bool:
        """Lets no new request in and waits for those that run."""
        return await self._routers.drain()

    async def restart(self, group: str, drain_seconds: float) -> None:
        """New processes for one group, of whatever is installed now: no new work goes to it, what runs may end within
        that time, and the rest moves. Returns once every router uses it; raises Unavailable when it does not come up
        or a router does not take it, and NotFound for no such group."""
        await self._groups.restart(group, drain_seconds)

    async def restart_router(self, address: str, drain_seconds: float) -> None:
        """The same for the router at gRPC's `address`, but that new requests must go to others meanwhile."""
        await self._routers.renew(address, drain_seconds)

    async def restart_supervisor(self) -> None:
        """Never answers: Ray starts the next one, of whatever is installed now, and that adopts what runs."""
        os._exit(1)

    async def scale(self, groups: int, drain_seconds: float) -> None:
        """So many groups, once every router uses them, or once those that go have ended: no new work goes to these,
        what runs may end within that time, and the rest moves. Raises InvalidConfig where Ray has no room, and
        Unavailable; what was to be added is then taken back."""
        await self._groups.scale(groups, drain_seconds)

    async def stop(self, *, now: bool = False) -> None:
        """Ends the routers and every rank, and gives their places back; the actor itself is for the caller to end."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await asyncio.gather(self._routers.stop(now=now), self._groups.stop(now=now))
        if self._config.max_groups is not None:
            launch.ask_room(self._placement.bundle, 0)

    async def _supervise(self) -> None:
        try:
            # A router's start needs no group: its process comes up beside theirs.
            async with asyncio.TaskGroup() as lives:
                lives.create_task(self._routers.keep())
                await self._groups.keep(lives)
                if self._config.max_groups is not None:
                    lives.create_task(self._autoscaler(self._config.max_groups).keep())
        except* Exception as errors:
            _log.exception("the supervisor's own work has failed")
            self._failure = str(errors.exceptions[0])
            if any(group.state == "serving" for group in self._groups.states):
                os._exit(1)  # Ray starts it again, and it adopts what runs: better than nobody watching

    def _autoscaler(self, most: int) -> Autoscaler:
        config = self._config
        rule = AutoscaleRule(
            least=config.groups,
            most=most,
            target_seconds=config.queue_target,
            shrink_hold_seconds=config.scale_in_after,
        )
        return Autoscaler(
            rule,
            pressure=self._routers.pressure,
            size=lambda: self._groups.size,
            ask_room=lambda groups: launch.ask_room(self._placement.bundle, groups * config.tp),
            scale=self._groups.scale,
        )

    def _tell_routers(self) -> None:
        self._routers.set_groups(self._groups.states)
