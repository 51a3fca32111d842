"""Supervisor: a detached Ray actor that keeps the router and the groups running.

Ray starts it again when it dies, with the arguments of its first start; it then adopts what still runs. It tells the
router of every change in a group at once. It does not know tokens, nor who reads its state.
"""

import asyncio
import logging
import os
from collections import Counter

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from ..proto.errors import InvalidConfig
from ..proto.log_lines import configure_logging
from . import launch
from .authority import Plane
from .cluster_state import ClusterState
from .config import ServeConfig
from .group_keeper import GroupKeeper
from .placement import Placement
from .router_keeper import RouterKeeper

_RESERVE_SECONDS = 60

_log = logging.getLogger(__name__)


class Supervisor:
    """Every method answers at once, but for `drain` and `stop`."""

    # Ray awaits an async actor's constructor in the loop of its methods, also when it starts the actor again.
    async def __init__(self, config: ServeConfig, placement: Placement, plane: Plane) -> None:  # type: ignore[misc]
        configure_logging(config.log_format, actor="supervisor")
        self._config = config
        self._placement = placement
        self._plane = plane
        self._groups: list[GroupKeeper] = []
        self._reserved: list[PlacementGroup] = []
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._router = RouterKeeper(
            launch.router_config(config, config.grpc_port, plane.router),
            has_served=self._is_restarted,
            resource=config.router_resource,
        )
        self._failure = ""
        self._life = asyncio.create_task(self._supervise())

    async def config(self) -> ServeConfig:
        """What this cluster was asked to be."""
        return self._config

    async def state(self) -> ClusterState:
        """How far everything is."""
        groups = tuple(keeper.state for keeper in self._groups)
        failed = next((group.reason for group in groups if group.state == "failed"), "")
        failure = self._failure or self._router.failure or failed
        return ClusterState(groups, self._router.address, failure, self._router.http_address)

    async def drain(self) -> bool:
        """Lets no new request in and waits for those that run."""
        return await self._router.drain()

    async def stop(self, *, now: bool = False) -> None:
        """Ends the router and every rank, and gives their places back; the actor itself is for the caller to end."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        await asyncio.gather(self._router.stop(now=now), *(keeper.stop(now=now) for keeper in self._groups))
        for reserved in self._reserved:
            ray.util.remove_placement_group(reserved)

    async def _supervise(self) -> None:
        try:
            # The router's start needs no group: its process comes up beside theirs.
            async with asyncio.TaskGroup() as lives:
                lives.create_task(self._router.keep())
                await self._reserve()
                # All are known before the router hears of any, so that it drops none that a restart has found running.
                await asyncio.gather(*(keeper.adopt() for keeper in self._groups))
                self._tell_router()
                for keeper in self._groups:
                    lives.create_task(keeper.keep())
        except* Exception as errors:
            _log.exception("the supervisor's own work has failed")
            self._failure = str(errors.exceptions[0])
            if any(keeper.state.state == "serving" for keeper in self._groups):
                os._exit(1)  # Ray starts it again, and it adopts what runs: better than nobody watching

    async def _reserve(self) -> None:
        """A place for every group, then what its ranks share there."""
        config, tp = self._config, self._config.tp
        self._reserved = [launch.reserve(name, self._placement, tp) for name in config.group_names]
        waits = [asyncio.to_thread(reserved.wait, _RESERVE_SECONDS) for reserved in self._reserved]
        if not all(await asyncio.gather(*waits)):
            raise InvalidConfig(f"Ray found no place for every group in {_RESERVE_SECONDS:.0f} s; see `ray status`")
        hosts = [placement_group_table(reserved)["bundles_to_node_id"] for reserved in self._reserved]
        ranks_on_host = Counter(node for bundles in hosts for node in bundles.values())
        loopback = launch.count_nodes() == 1
        self._groups = [
            GroupKeeper(
                launch.group_config(config, name, self._placement, loopback=loopback, plane=self._plane.group),
                reserved,
                ranks_on_host=max(ranks_on_host[node] for node in bundles.values()),
                loopback=loopback,
                has_served=self._is_restarted,
                on_change=self._tell_router,
            )
            for name, reserved, bundles in zip(config.group_names, self._reserved, hosts, strict=True)
        ]

    def _tell_router(self) -> None:
        self._router.set_groups([keeper.state for keeper in self._groups])
