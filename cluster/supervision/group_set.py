"""GroupSet: the groups of a cluster, each with its place and its keeper; their number may change while they serve.

They are group-0 and up without a gap, so that their number says which there are: Ray keeps it, for a supervisor that
comes back. It does not know routers: whoever makes it hears of changes, and gives a way to wait for a group to empty.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import ray
from ray.util.placement_group import PlacementGroup

from coatcheck.cluster.config.serve_config import ServeConfig, group_names
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.ray_cluster import ray_kv as cluster_notes
from coatcheck.cluster.ray_cluster.rank_placement import RankPlacement, choose_placement
from coatcheck.cluster.supervision.cluster_state import GroupState
from coatcheck.cluster.supervision.group_supervisor import GroupSupervisor
from coatcheck.cluster.supervision.member_config import group_config
from coatcheck.cluster.supervision.rank_actors import RankActors
from coatcheck.cluster.supervision.rank_hosts import RankHosts
from coatcheck.proto.errors import InvalidConfig, NotFound, Unavailable
from coatcheck.proto.plane_certificate import PlaneCertificate

_RESERVE_SECONDS = 60

_log = logging.getLogger(__name__)

# Waits until a group that takes no new work has none, or the time is up.
WaitIdle = Callable[[str, float], Awaitable[None]]
# Until every router uses a group that serves; raises Unavailable where one does not.
WaitUsed = Callable[[str], Awaitable[None]]


class GroupSet:
    """`states` is always current. One change at a time: the next one waits."""

    def __init__(
        self,
        config: ServeConfig,
        placement: RankPlacement,
        plane: PlaneCertificate | None,
        *,
        is_restarted: bool,
        on_change: Callable[[], None],
        wait_idle: WaitIdle,
        wait_used: WaitUsed,
    ) -> None:
        self._config = config
        self._placement = placement
        self._plane = plane
        self._is_restarted = is_restarted
        self._on_change = on_change
        self._wait_idle = wait_idle
        self._wait_used = wait_used
        self._hosts = RankHosts()
        self._keepers: list[GroupSupervisor] = []
        self._reserved: dict[str, PlacementGroup] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._task_group: asyncio.TaskGroup | None = None
        self._left: set[str] = set()  # by name, since Ray still knows their numbers
        self._growing: set[str] = set()  # not yet known to serve: their failure is theirs alone
        self._changing = asyncio.Lock()

    @property
    def states(self) -> list[GroupState]:
        """Of every group."""
        return [keeper.state for keeper in self._keepers]

    @property
    def failure(self) -> str:
        """Why the cluster will never serve, else empty."""
        failed = (one for one in self.states if one.state == "failed" and one.name not in self._growing)
        return next((one.reason for one in failed), "")

    @property
    def size(self) -> int:
        """How many there are to be."""
        return len(self._keepers) or self._wished()

    async def keep(self, task_group: asyncio.TaskGroup) -> None:
        """Finds a place for all, adopts what runs, and holds each up in a task of that group."""
        self._task_group = task_group
        async with self._changing:
            if not self._is_restarted:
                cluster_notes.forget_group_count()
            names = group_names(self._wished())
            # Those that need a whole node come first; what a scaling has added is there, and found by its name.
            strategies = [*self._placement.strategies, *["PACK"] * len(names)]
            for name, strategy in zip(names, strategies, strict=False):
                await self._reserve(name, strategy, wait=not self._is_restarted)
            self._keepers = [self._keeper(name, has_served=self._is_restarted) for name in names]
            # All are known before a router hears of any, so that it drops none that a restart has found running.
            await asyncio.gather(*(keeper.adopt() for keeper in self._keepers))
            self._on_change()
            for keeper in self._keepers:
                self._live(keeper)

    async def restart(self, group: str, drain_seconds: float) -> None:
        """See Supervisor.restart."""
        async with self._changing:
            keeper = next((keeper for keeper in self._keepers if keeper.state.name == group), None)
            if keeper is None:
                names = ", ".join(one.name for one in self.states)
                raise NotFound(f"there is no group {group!r}; there are {names}")
            if not any(other.state.state == "serving" for other in self._keepers if other is not keeper):
                raise Unavailable(f"no group but {group} serves, and requests would be refused; wait, or add a group")
            keeper.drain()
            await self._wait_idle(group, drain_seconds)
            await keeper.renew()
            await self._wait_used(group)

    async def scale(self, groups: int, drain_seconds: float) -> None:
        """See Supervisor.scale."""
        if groups < 1:
            raise InvalidConfig(f"groups is {groups}; at least one is needed to serve: end the command to stop")
        async with self._changing:
            if not self._keepers:
                raise Unavailable("the cluster has no places for its groups yet; wait until it serves")
            if groups > len(self._keepers):
                await self._grow(groups)
            while groups < len(self._keepers):
                await self._shrink(groups, drain_seconds)

    async def stop(self, *, now: bool) -> None:
        """Ends every rank, and gives the places back."""
        await asyncio.gather(*(keeper.stop(now=now) for keeper in self._keepers))
        for reserved in self._reserved.values():
            ray.util.remove_placement_group(reserved)
        for name in self._left:
            cluster_notes.forget_starts(name)
        cluster_notes.forget_group_count()

    def _wished(self) -> int:
        return cluster_notes.group_count() or self._config.groups

    async def _grow(self, groups: int) -> None:
        """Up to so many, or, where one finds no place or does not serve, as many as before.

        The number is noted before there is anything to find, and again after it is gone: a supervisor that is lost in
        between finds every group by it, and leaves none behind.
        """
        before, tp = len(self._keepers), self._config.tp
        names = group_names(groups)[before:]
        free = await asyncio.to_thread(launch.free_resources)
        added = choose_placement(self._placement.device, len(names), tp, free)
        try:
            cluster_notes.note_group_count(groups)
            for name, strategy in zip(names, added.strategies, strict=True):
                await self._reserve(name, strategy, wait=True)
            self._growing.update(names)
            grown = [self._keeper(name, has_served=False) for name in names]
            self._keepers += grown
            for keeper in grown:
                await keeper.adopt()  # of one that was here before, only its number is left
                self._live(keeper)
            for keeper in grown:
                await keeper.wait_started()
                await self._wait_used(keeper.state.name)
            _log.info("%s now", counted(groups, "group"))
        except BaseException:
            for name in reversed(names):
                await self._remove(name)
            cluster_notes.note_group_count(before)
            raise
        finally:
            self._growing.difference_update(names)

    async def _shrink(self, groups: int, drain_seconds: float) -> None:
        """By the last one; what still runs there after that time moves to others."""
        leaving = self._keepers[groups:]
        if not any(keeper.state.state == "serving" for keeper in self._keepers[:groups]):
            raise Unavailable(f"none of {', '.join(group_names(groups))} serves, and requests would be refused; wait")
        for keeper in leaving:  # at once, so that none of them takes over what another had
            keeper.drain()
        try:
            await asyncio.gather(*(self._wait_idle(keeper.state.name, drain_seconds) for keeper in leaving))
        except BaseException:
            for keeper in leaving:
                keeper.undrain()
            raise
        for keeper in reversed(leaving):
            await self._remove(keeper.state.name)
            # Only now: a supervisor that is lost before finds the group, and nothing is left behind.
            cluster_notes.note_group_count(len(self._keepers))
        _log.info("%s now", counted(groups, "group"))

    async def _remove(self, name: str) -> None:
        keeper = next((keeper for keeper in self._keepers if keeper.state.name == name), None)
        if keeper is not None:
            self._keepers.remove(keeper)
            self._on_change()  # routers let go of it first: its streams move at once
            if (life := self._lives.pop(name, None)) is not None:
                life.cancel()
                with suppress(asyncio.CancelledError):
                    await life
            await keeper.stop(now=False)
            # Ray may not have freed its ranks' names when a group of this name comes again: it takes the next ones.
            cluster_notes.note_start(name, keeper.state.restarts)
            self._left.add(name)
        self._hosts.note(name, [])
        if (reserved := self._reserved.pop(name, None)) is not None:
            ray.util.remove_placement_group(reserved)

    async def _reserve(self, name: str, strategy: str, *, wait: bool) -> None:
        """A place for a group; one that need not be there at once is waited for by the group's keeper."""
        reserved = launch.reserve(name, self._placement.bundle, strategy, self._config.tp)
        self._reserved[name] = reserved
        if wait and not await asyncio.to_thread(reserved.wait, _RESERVE_SECONDS):
            raise InvalidConfig(self._no_place(name, strategy))
        self._hosts.note(name, launch.hosts_of(reserved))

    def _keeper(self, name: str, *, has_served: bool) -> GroupSupervisor:
        config = group_config(self._config, name, self._placement, self._plane)
        ranks = RankActors(config, self._reserved[name], self._hosts, loopback=self._config.ray_address is None)
        return GroupSupervisor(ranks, has_served=has_served, on_change=self._on_change)

    def _live(self, keeper: GroupSupervisor) -> None:
        assert self._task_group is not None
        self._lives[keeper.state.name] = self._task_group.create_task(keeper.keep())

    def _no_place(self, name: str, strategy: str) -> str:
        needs = ", ".join(f"{self._config.tp * amount:g} {kind}" for kind, amount in self._placement.bundle.items())
        where = "on one node" if strategy == "STRICT_PACK" else "over its nodes"
        return (
            f"Ray found no place for {name} in {_RESERVE_SECONDS} s: it needs {needs} free {where}; "
            "see `ray status` for who else holds them"
        )
