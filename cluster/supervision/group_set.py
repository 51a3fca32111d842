"""GroupSet: the groups of a cluster, each with a placement group and a GroupSupervisor. Scales and restarts them.

Groups are named group-0, group-1, ... without a gap. Therefore a restarted supervisor needs only the number of groups,
which is in Ray's key-value store, to know which groups exist.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup

from coatcheck.cluster.config.derived_config import group_config
from coatcheck.cluster.config.serve_config import ServeConfig, group_names
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.cluster.ray_cluster.placement_plan import PlacementPlan, plan_placement
from coatcheck.cluster.supervision.group_supervisor import GroupSupervisor
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.rank_actors import RankActors, RankNodes
from coatcheck.cluster.supervision.router_set import RouterSet
from coatcheck.proto.errors import InvalidConfig, NotFound, Unavailable
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.workers.core.group_config import GroupConfig

_RESERVE_SECONDS = 60
_CHECK_SECONDS = 0.5  # between two checks of a group's ranks
_REQUEST_POLL_SECONDS = 0.02

_log = logging.getLogger(__name__)


@dataclass
class _Removal:
    """A removal that drains its groups. `leaving`: these groups. `drain`: done when no router has requests on them, or
    when `drain_seconds` are over. `is_given_up`: the groups are not removed."""

    leaving: list[GroupSupervisor]
    drain: "asyncio.Future[list[None]]"
    is_given_up: bool = False


class GroupSet:
    """All groups of a cluster. Sends every change of a group's state to `routers`.

    `is_restarted`: whether a former supervisor has started the groups. One restart runs at a time, and one removal. A
    removal does not wait for a restart, whose ranks may load for minutes. It may remove the group that is restarted. An
    addition does not wait for a drain. It ends every removal that waits or drains: those groups have their cache and
    serve at once.
    """

    def __init__(
        self,
        config: ServeConfig,
        plan: PlacementPlan,
        certificate: ClusterCertificate | None,
        routers: RouterSet,
        *,
        is_restarted: bool,
    ) -> None:
        self._config = config
        self._plan = plan
        self._certificate = certificate
        self._routers = routers
        self._is_restarted = is_restarted
        self._nodes = RankNodes()
        self._supervisors: list[GroupSupervisor] = []
        self._placement_groups: dict[str, PlacementGroup] = {}
        self._ranks: dict[str, RankActors] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._task_group: asyncio.TaskGroup | None = None
        self._removed: set[str] = set()  # names of removed groups; Ray's key-value store holds their start numbers
        self._joining: set[str] = set()  # groups that `_add_groups` is adding; if one fails, the cluster does not fail
        self._num_scale_ups = 0  # commands that wanted more groups; each ends the removals that came before it
        self._restart_lock = asyncio.Lock()  # held by a restart
        self._restarting: GroupSupervisor | None = None  # of the group whose ranks are drained and replaced
        self._drain_lock = asyncio.Lock()  # held while a restart begins, and by a removal from its drain to its end
        self._size_lock = asyncio.Lock()  # held while groups are added, and while the drained groups are removed
        self._removal: _Removal | None = None  # the removal that drains its groups, or removes them
        self._poll_interval = PollInterval(_CHECK_SECONDS)

    @property
    def states(self) -> list[GroupState]:
        """The current state of every group."""
        return [supervisor.state for supervisor in self._supervisors]

    @property
    def failure(self) -> str:
        """Why the cluster will never serve; "" if it may."""
        failed = (group for group in self.states if group.state == "failed" and group.name not in self._joining)
        return next((group.reason for group in failed), "")

    @property
    def size(self) -> int:
        """The number of groups, without those that are being removed. Before any group is started: the configured
        number."""
        leaving = self._removal.leaving if self._removal is not None else ()
        return sum(supervisor not in leaving for supervisor in self._supervisors) or self._configured_size()

    async def start_groups(self, task_group: asyncio.TaskGroup) -> None:
        """Reserve a placement group for each group, adopt ranks that run already, and supervise each group in a task of
        `task_group`. Raises InvalidConfig if Ray has no room."""
        self._task_group = task_group
        async with self._drain_lock, self._size_lock:
            if not self._is_restarted:
                ray_kv.delete_value(ray_kv.GROUP_COUNT)
            names = group_names(self._configured_size())
            # Groups that need a whole node come first. A group that `scale_groups` added before a restart has its
            # placement group already, so its strategy here has no effect.
            strategies = [*self._plan.strategies, *["PACK"] * len(names)]
            for name, strategy in zip(names, strategies, strict=False):
                await self._reserve(name, strategy, wait=not self._is_restarted)
            self._supervisors = [self._make_supervisor(name, has_served=self._is_restarted) for name in names]
            # Routers drop every group that a list lacks, so the first list must be complete.
            await asyncio.gather(*(supervisor.adopt_group() for supervisor in self._supervisors))
            self._publish_states()
            for supervisor in self._supervisors:
                self._supervise(supervisor)
            task_group.create_task(self._check_missing_groups())

    async def wait_for_rank_requests(self, seconds: float) -> None:
        """Return once Ray was asked for every rank of all groups, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._ranks and all(ranks.are_requested for ranks in self._ranks.values()):
                return
            await asyncio.sleep(_REQUEST_POLL_SECONDS)

    def set_config(self, config: ServeConfig) -> None:
        """Start groups with these settings from now on. Groups that run keep theirs until they start again."""
        self._config = config
        for name, ranks in self._ranks.items():
            ranks.set_config(self._group_config(name))

    async def restart_group(self, group: str, drain_seconds: float) -> None:
        """Drain a group, replace its ranks, and wait until every router uses it; see Supervisor.restart_group."""
        self._require_supervisor(group)
        if self._restart_lock.locked():
            _log.info("the restart of %s waits until another restart is complete", group)
        async with self._restart_lock:
            try:
                await self._replace_ranks(group, drain_seconds)
                await self._routers.wait_until_connected(group)
            except Unavailable:
                self._require_supervisor(group)  # if the group was removed meanwhile, that is the reason
                raise

    async def scale_groups(self, groups: int, drain_seconds: float) -> None:
        """Add or remove groups until there are `groups`; see Supervisor.scale_groups."""
        if groups < 1:
            raise InvalidConfig(f"groups is {groups}; it must be at least 1 (to stop, end `coatcheck serve`)")
        await self._change_size(groups, drain_seconds)

    async def scale_groups_from(self, before: int, groups: int, drain_seconds: float) -> None:
        """As `scale_groups`, but does nothing if `size` is not `before` once the change may begin: another command has
        changed the number since the caller chose `groups`."""
        await self._change_size(groups, drain_seconds, before)

    async def stop_groups(self, *, now: bool) -> None:
        """End every rank, and remove the placement groups."""
        await asyncio.gather(*(supervisor.stop_group(now=now) for supervisor in self._supervisors))
        for placement_group in self._placement_groups.values():
            ray.util.remove_placement_group(placement_group)
        for name in {*self._placement_groups, *self._removed}:
            ray_kv.delete_value(ray_kv.start_number_key(name))
        ray_kv.delete_value(ray_kv.GROUP_COUNT)

    def _configured_size(self) -> int:
        return ray_kv.read_number(ray_kv.GROUP_COUNT) or self._config.groups

    async def _replace_ranks(self, group: str, drain_seconds: float) -> None:
        try:
            async with self._drain_lock:
                supervisor = self._restarting = await self._begin_restart(group)
            await self._wait_until_idle(supervisor, drain_seconds)
            await supervisor.restart_group()
        finally:
            self._restarting = None
        if self._removal is not None and supervisor in self._removal.leaving:
            supervisor.drain_group()

    async def _begin_restart(self, group: str) -> GroupSupervisor:
        """Drain the group if another one serves. Returns the group's supervisor."""
        supervisor = self._require_supervisor(group)
        if group in self._joining:
            raise Unavailable(f"{group} is being added; wait until it serves")
        # A group that is being added does not count: it is removed if another new group does not start.
        serving = [state.name for state in self.states if state.state == "serving"]
        others = [name for name in serving if name != group and name not in self._joining]
        if not others:
            raise Unavailable(f"no group but {group} serves, and requests would be refused; wait, or add a group")
        await self._require_undrained(others)
        supervisor.drain_group()
        return supervisor

    async def _wait_until_idle(self, supervisor: GroupSupervisor, drain_seconds: float) -> None:
        """Return once the group has no requests, after `drain_seconds`, or once the group is removed."""
        waits = [
            asyncio.ensure_future(self._routers.wait_until_idle(supervisor.state.name, drain_seconds)),
            asyncio.ensure_future(supervisor.wait_until_stopped()),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()

    def _require_supervisor(self, group: str) -> GroupSupervisor:
        """The group's supervisor. Raises NotFound if there is no such group."""
        supervisor = self._find_supervisor(group)
        if supervisor is None:
            names = ", ".join(state.name for state in self.states)
            raise NotFound(f"there is no group {group!r}; there are {names}")
        return supervisor

    async def _change_size(self, groups: int, drain_seconds: float, before: int | None = None) -> None:
        """See `scale_groups`, and for `before` see `scale_groups_from`."""
        async with self._size_lock:
            if not self._supervisors:
                raise Unavailable("the groups of this cluster are not placed on nodes yet; wait until it serves")
            if before not in (None, self.size):
                return
            if groups > self.size:
                self._num_scale_ups += 1
                self._give_up_removal()
                if groups > len(self._supervisors):
                    await self._add_groups(groups)
            num_scale_ups = self._num_scale_ups
        if groups < len(self._supervisors):
            await self._remove_groups(groups, drain_seconds, before, num_scale_ups)

    async def _add_groups(self, groups: int) -> None:
        """Add groups until there are `groups`. If one finds no room or does not serve, remove all that were added.

        The number of groups is written before the first new group exists, and restored after the last one is removed.
        Therefore a supervisor that is restarted in between finds every group.
        """
        before, tp = len(self._supervisors), self._config.tp
        names = group_names(groups)[before:]
        free = await asyncio.to_thread(launch.free_resources)
        plan = plan_placement(self._plan.device, len(names), tp, free)
        try:
            ray_kv.write_number(ray_kv.GROUP_COUNT, groups)
            for name, strategy in zip(names, plan.strategies, strict=True):
                await self._reserve(name, strategy, wait=True)
            self._joining.update(names)
            added = [self._make_supervisor(name, has_served=False) for name in names]
            self._supervisors += added
            for supervisor in added:
                await supervisor.adopt_group()  # for the start number of a former group of this name
                self._supervise(supervisor)
            for supervisor in added:
                await supervisor.wait_until_serving()
                await self._routers.wait_until_connected(supervisor.state.name)
            _log.info("%s now", counted(groups, "group"))
        except BaseException:
            for name in reversed(names):
                await self._remove(name)
            ray_kv.write_number(ray_kv.GROUP_COUNT, before)
            raise
        finally:
            self._joining.difference_update(names)

    async def _remove_groups(self, groups: int, drain_seconds: float, before: int | None, num_scale_ups: int) -> None:
        """Remove the last groups until there are `groups`. Requests that run after `drain_seconds` move to others.
        `num_scale_ups`: `_num_scale_ups` when the removal was chosen. Raises Unavailable if more groups are wanted
        since."""
        async with self._drain_lock:
            async with self._size_lock:
                leaving = self._supervisors[groups:]
                if not leaving or before not in (None, self.size):
                    return
                if num_scale_ups != self._num_scale_ups:
                    raise _given_up(leaving)
                removal = self._removal = await self._begin_removal(leaving, drain_seconds)
            try:
                await removal.drain
                async with self._size_lock:
                    if not removal.is_given_up:
                        await self._end_removal(leaving)
                        return
            except asyncio.CancelledError:
                if not removal.is_given_up:
                    raise
            finally:
                if self._removal is removal:
                    self._give_up_removal()
            raise _given_up(leaving)

    async def _begin_removal(self, leaving: list[GroupSupervisor], drain_seconds: float) -> "_Removal":
        staying = [supervisor.state for supervisor in self._supervisors if supervisor not in leaving]
        serving = [state.name for state in staying if state.state == "serving"]
        if not serving:
            names = ", ".join(state.name for state in staying)
            raise Unavailable(f"none of {names} serves, and requests would be refused; wait")
        await self._require_undrained(serving)
        for supervisor in leaving:  # all before the wait, so that no request moves to a group that is removed next
            supervisor.drain_group()
        waits = (self._routers.wait_until_idle(supervisor.state.name, drain_seconds) for supervisor in leaving)
        return _Removal(leaving, asyncio.gather(*waits))

    async def _end_removal(self, leaving: list[GroupSupervisor]) -> None:
        for supervisor in reversed(leaving):
            await self._remove(supervisor.state.name)
            # After the removal: a supervisor that is restarted in between still finds the group.
            ray_kv.write_number(ray_kv.GROUP_COUNT, len(self._supervisors))
        self._removal = None
        _log.info("%s now", counted(len(self._supervisors), "group"))

    def _give_up_removal(self) -> None:
        """Keep the groups of the removal that drains, if any. Its `_remove_groups` then raises Unavailable."""
        removal, self._removal = self._removal, None
        if removal is not None:
            removal.is_given_up = True
            removal.drain.cancel()
            for supervisor in removal.leaving:
                if supervisor is not self._restarting:  # its restart drains it
                    supervisor.undrain_group()

    async def _require_undrained(self, groups: Sequence[str]) -> None:
        """Raises Unavailable if some router has drained all of `groups`, the serving groups that would remain."""
        if router := await self._routers.find_router_without(groups):
            raise Unavailable(
                f"{router} has drained {', '.join(groups)}, and without another group it would refuse requests; "
                f"first run `coatcheck drain {groups[0]} --undo`"
            )

    async def _remove(self, name: str) -> None:
        supervisor = self._find_supervisor(name)
        if supervisor is not None:
            self._supervisors.remove(supervisor)
            self._ranks.pop(name, None)
            self._publish_states()  # before the ranks end, so that routers move its streams at once
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await supervisor.stop_group(now=False)
            # The start number stays: Ray may not have freed the actors' names when a group of this name is added again,
            # and that group then uses the next names.
            self._removed.add(name)
        self._nodes.set_nodes(name, [])
        if (placement_group := self._placement_groups.pop(name, None)) is not None:
            ray.util.remove_placement_group(placement_group)

    async def _reserve(self, name: str, strategy: str, *, wait: bool) -> None:
        """Reserve the placement group of a group. Without `wait` the GroupSupervisor waits for its nodes."""
        placement_group = launch.reserve_placement_group(name, self._plan.bundle, strategy, self._config.tp)
        self._placement_groups[name] = placement_group
        if wait and not await asyncio.to_thread(placement_group.wait, _RESERVE_SECONDS):
            needs = ", ".join(f"{self._config.tp * amount:g} {kind}" for kind, amount in self._plan.bundle.items())
            where = "on one node" if strategy == "STRICT_PACK" else "over its nodes"
            raise InvalidConfig(
                f"Ray did not reserve resources for {name} within {_RESERVE_SECONDS} s: it needs {needs} free {where}; "
                "`ray status` shows who holds them"
            )
        self._nodes.set_nodes(name, launch.bundle_nodes(placement_group))

    def _make_supervisor(self, name: str, *, has_served: bool) -> GroupSupervisor:
        config = self._group_config(name)
        loopback = self._config.ray_address is None
        ranks = RankActors(config, self._placement_groups[name], self._nodes, loopback=loopback)
        self._ranks[name] = ranks
        return GroupSupervisor(ranks, self._poll_interval, has_served=has_served, on_change=self._publish_states)

    def _group_config(self, name: str) -> GroupConfig:
        return group_config(self._config, name, self._plan.device, self._certificate)

    def _find_supervisor(self, name: str) -> GroupSupervisor | None:
        return next((supervisor for supervisor in self._supervisors if supervisor.state.name == name), None)

    def _supervise(self, supervisor: GroupSupervisor) -> None:
        assert self._task_group is not None
        self._tasks[supervisor.state.name] = self._task_group.create_task(supervisor.supervise_group())

    async def _check_missing_groups(self) -> None:
        """Check a group's ranks at once if a router is not connected to the group, because its ranks may hang."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._poll_interval.actors = len(self._supervisors) * self._config.tp
            for name in self._routers.missing_groups():
                if (supervisor := self._find_supervisor(name)) is not None:
                    supervisor.check_now()

    def _publish_states(self) -> None:
        self._routers.set_groups(self.states)


def _given_up(leaving: Sequence[GroupSupervisor]) -> Unavailable:
    names = ", ".join(supervisor.state.name for supervisor in leaving)
    return Unavailable(f"the removal of {names} was given up, because more groups are wanted now")
