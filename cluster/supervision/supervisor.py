"""Supervisor: a detached Ray actor that keeps the routers and the groups of a cluster running.

If it dies, Ray starts it again with the arguments of its first start. It then adopts the running routers and ranks.
"""

import asyncio
import logging
import os

import ray

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState
from coatcheck.cluster.ray_cluster.placement_plan import PlacementPlan
from coatcheck.cluster.supervision.autoscaler import Autoscaler, AutoscaleRule
from coatcheck.cluster.supervision.config_rollout import ConfigRollout, Pending, StoredRollout, read_rollout
from coatcheck.cluster.supervision.group_set import GroupSet
from coatcheck.cluster.supervision.router_set import RouterSet
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.log_lines import configure_logging

_RANKS_FIRST_SECONDS = 2.0  # longest delay of the routers' start

_log = logging.getLogger(__name__)


class Supervisor:
    """The actor. `coatcheck serve`, `restart` and `scale` call its methods; SupervisorHandle has their types.

    The `get_` and `find_` methods answer at once. The others return when the change is complete.
    """

    # Ray awaits an async constructor on the event loop of the methods, also when Ray restarts the actor.
    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, plan: PlacementPlan, certificates: CertificatesByRole, resume_key: bytes = b""
    ) -> None:
        configure_logging(config.log_format, actor="supervisor")
        self._plan = plan
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if not self._is_restarted:
            ray_kv.delete_value(ray_kv.ROLLOUT)
        stored = read_rollout() or StoredRollout(config, Pending())
        config = stored.config
        self._routers = RouterSet(config, certificates.router, resume_key, has_served=self._is_restarted)
        self._groups = GroupSet(config, plan, certificates.group, self._routers, is_restarted=self._is_restarted)
        self._rollout = ConfigRollout(stored, self._groups, self._routers, self._configure_autoscaler)
        self._failure = ""
        self._autoscaler = Autoscaler(
            make_autoscale_rule(config),
            measure_queue=self._routers.measure_queue,
            count_groups=lambda: self._groups.size,
            restarts_wait=lambda: self._rollout.restarts_wait,
            request_room=lambda groups: launch.request_nodes(plan.bundle, groups * config.tp),
            scale_groups=self._groups.scale_groups_from,
        )
        self._supervision = asyncio.create_task(self._supervise())

    async def get_contract(self) -> tuple[int, str]:
        """(contract number, version) of this process; see proto/contract.py. Every version has this method."""
        return CONTRACT, VERSION

    async def get_config(self) -> ServeConfig:
        """The settings of the cluster. `groups` is the number after the last scaling."""
        return self._rollout.config.model_copy(update={"groups": self._groups.size})

    async def apply_config(self, config: ServeConfig) -> str:
        """Begin a rollout of new settings; see ConfigRollout. Returns why they are refused, or ""."""
        return self._rollout.apply(config)

    async def get_state(self) -> ClusterState:
        groups = tuple(self._groups.states)
        failure = self._failure or self._routers.failure or self._groups.failure
        addresses = tuple(self._routers.addresses) if self._routers.all_serve else ()
        http_addresses = tuple(self._routers.http_addresses)
        rollout = self._rollout
        routers = self._routers.states
        return ClusterState(groups, addresses, failure, http_addresses, rollout.status, rollout.obstacle, routers)

    async def find_missing_connection(self) -> str:
        """See RouterSet. Until the result is "", routers may refuse requests for lack of capacity."""
        return await self._routers.find_missing_connection()

    async def drain_routers(self) -> bool:
        """Refuse new requests and wait for the running ones. Returns whether every router is drained."""
        return await self._routers.drain_routers()

    async def restart_group(self, group: str, drain_seconds: float) -> None:
        """Replace the processes of a group with processes of the version that is installed now.

        Routers send the group no new requests. Requests that still run after `drain_seconds` move to other groups.
        Returns once every router uses the group again. Raises NotFound for an unknown group, and Unavailable if no
        other group serves, the group does not start, or a router does not use it.
        """
        await self._groups.restart_group(group, drain_seconds)

    async def restart_router(self, address: str, drain_seconds: float) -> None:
        """Replace the process of the router whose gRPC address is `address`. Meanwhile clients must use another router.
        Raises NotFound and Unavailable."""
        await self._routers.restart_router(address, drain_seconds)

    async def restart_supervisor(self) -> None:
        """End this process. Ray starts another one, of the version that is installed now. The call never returns."""
        os._exit(1)

    async def scale_groups(self, groups: int, drain_seconds: float) -> None:
        """Add or remove groups until there are `groups`. Returns once every router uses the new groups, or once the
        removed groups have ended.

        A group that is removed gets no new requests; requests that still run after `drain_seconds` move to other
        groups. Raises InsufficientResources if Ray has no room, and Unavailable if a new group does not start. Then
        all new groups are removed again.
        """
        await self._groups.scale_groups(groups, drain_seconds)

    async def stop_all(self, now: bool = False) -> None:
        """End every router and rank, and release their resources. `now`: kill them at once. The caller must kill this
        actor afterwards."""
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        await asyncio.gather(self._routers.stop_routers(now=now), self._groups.stop_groups(now=now))
        ray_kv.delete_value(ray_kv.ROLLOUT)
        if self._rollout.config.max_groups is not None:
            launch.request_nodes(self._plan.bundle, 0)

    async def _supervise(self) -> None:
        try:
            # Routers and groups start at the same time.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._supervise_routers(tasks))
                await self._groups.start_groups(tasks)
                tasks.create_task(self._autoscaler.run_forever())
                tasks.create_task(self._rollout.run_forever())
        except* Exception as errors:
            _log.exception("the supervisor's own work has failed")
            self._failure = str(errors.exceptions[0])
            if any(group.state == "serving" for group in self._groups.states):
                os._exit(1)  # Ray starts another supervisor, which adopts the groups that serve

    async def _supervise_routers(self, tasks: asyncio.TaskGroup) -> None:
        # Ray gives the actors that are requested first the processes that it has started ahead. Ranks take longer to
        # start than routers.
        if not self._is_restarted:
            await self._groups.wait_for_rank_requests(_RANKS_FIRST_SECONDS)
        await self._routers.supervise_routers(tasks)

    def _configure_autoscaler(self, config: ServeConfig) -> None:
        """Autoscale with these settings from now on; without max_groups, stop."""
        self._autoscaler.set_rule(make_autoscale_rule(config))


def make_autoscale_rule(config: ServeConfig) -> AutoscaleRule | None:
    """The rule of a cluster with these settings; None if it has no max_groups."""
    if config.max_groups is None:
        return None
    return AutoscaleRule(
        min_groups=config.groups,
        max_groups=config.max_groups,
        target_seconds=config.queue_target,
        shrink_hold_seconds=config.scale_in_after,
    )
