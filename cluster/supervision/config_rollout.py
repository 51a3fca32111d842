"""ConfigRollout: gives a running cluster new settings by restarting one group or one router at a time.

Ray's key-value store holds the new settings, and the names of the groups and routers that still have the former ones.
So a restarted supervisor continues the rollout.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from ray.exceptions import RayError

from coatcheck.cluster.config.config_change import compare_configs
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster import ray_kv
from coatcheck.cluster.ray_cluster.cluster_state import GroupState, RouterState
from coatcheck.proto.errors import CoatcheckError, Unavailable

_DRAIN_SECONDS = 30.0  # as `coatcheck restart` and `scale` give by default
_RETRY_SECONDS = 5.0  # after a step that was not possible, such as more groups than nodes have room for

_log = logging.getLogger(__name__)


class Groups(Protocol):
    """What a rollout needs of GroupSet."""

    @property
    def states(self) -> list[GroupState]: ...
    @property
    def size(self) -> int: ...
    def set_config(self, config: ServeConfig) -> None: ...
    async def restart_group(self, group: str, drain_seconds: float) -> None: ...
    async def scale_groups(self, groups: int, drain_seconds: float) -> None: ...


class Routers(Protocol):
    """What a rollout needs of RouterSet."""

    @property
    def addresses(self) -> list[str]: ...
    @property
    def states(self) -> Sequence[RouterState] | None: ...
    def set_config(self, config: ServeConfig) -> None: ...
    def set_configuration(self, text: str) -> None: ...
    async def restart_router(self, address: str, drain_seconds: float) -> None: ...


@dataclass
class Pending:
    """The rest of a rollout. `groups`: each group that must be restarted, with the number of its start that has the
    former settings. `routers`: gRPC addresses of the routers that must be restarted. `scale`: whether the number of
    groups must change. `reasons`: names of the settings that require a restart."""

    groups: dict[str, int] = field(default_factory=dict)
    routers: list[str] = field(default_factory=list)
    scale: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.groups or self.routers or self.scale)


@dataclass(frozen=True)
class StoredRollout:
    """The rollout as stored in Ray's key-value store."""

    config: ServeConfig
    pending: Pending

    def write(self) -> None:
        settings = self.config.model_dump(mode="json", exclude_unset=True)
        ray_kv.write_text(ray_kv.ROLLOUT, json.dumps({"config": settings, "pending": asdict(self.pending)}))


def read_rollout() -> StoredRollout | None:
    """The rollout that an earlier supervisor stored; None if the settings never changed."""
    if (text := ray_kv.read_text(ray_kv.ROLLOUT)) is None:
        return None
    stored = json.loads(text)
    return StoredRollout(ServeConfig.model_validate(stored["config"]), Pending(**stored["pending"]))


class ConfigRollout:
    """`config`: the newest settings. `obstacle`: why a step of the last round failed, or "". `apply_live` is called
    with the new settings if a setting with Effect.LIVE or the number of groups has changed."""

    def __init__(
        self,
        stored: StoredRollout,
        groups: Groups,
        routers: Routers,
        apply_live: Callable[[ServeConfig], None],
    ) -> None:
        self.config = stored.config
        self._pending = stored.pending
        self._groups = groups
        self._routers = routers
        self._apply_live = apply_live
        self._refusal = ""
        self.obstacle = ""
        self._has_work = asyncio.Event()

    @property
    def status(self) -> str:
        """Why the cluster does not have the settings that were last wanted; "" if it has them."""
        if self._refusal:
            return f"refused: {self._refusal}"
        waits = []
        if self._pending.scale:
            waits.append(f"{counted(self._wanted_groups, 'group')} instead of {self._groups.size}")
        if names := [*sorted(self._pending.groups), *(f"the router at {one}" for one in self._pending.routers)]:
            waits.append(f"a restart of {', '.join(names)} for {', '.join(self._pending.reasons)}")
        because = f" ({self.obstacle})" if self.obstacle else ""
        return f"waits for {' and '.join(waits)}{because}" if waits else ""

    @property
    def restarts_wait(self) -> bool:
        """Whether groups must still be restarted."""
        return bool(self._pending.groups)

    def apply(self, wanted: ServeConfig) -> str:
        """Begin a rollout of the settings `wanted`. Returns why they are refused, or "". A refusal changes nothing."""
        change = compare_configs(self.config, wanted)
        self._refusal = change.refusal
        if not change.refusal:
            if change.scale and not ray_kv.read_number(ray_kv.GROUP_COUNT):
                # Until the groups are scaled, a restarted supervisor must find the number of groups that run.
                ray_kv.write_number(ray_kv.GROUP_COUNT, len(self._groups.states) or self._groups.size)
            self.config = wanted
            self._add_pending(change.groups, change.routers, scale=change.scale)
            self._groups.set_config(wanted)
            self._routers.set_config(wanted)
            if change.live or change.scale:
                self._apply_live(wanted)
        self._publish()
        self._has_work.set()
        return change.refusal

    async def run_forever(self) -> None:
        """Carry out the pending steps. Retry failed steps after 5 s."""
        self._publish()
        while True:
            if self._pending.is_empty:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            steps = (self._scale, self._restart_groups, self._restart_routers)
            refusals = [await self._try(step) for step in steps]
            self.obstacle = next(filter(None, refusals), "")
            self._publish()
            if self.obstacle:
                _log.warning("settings: %s", self.status)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _try(self, step: Callable[[], Awaitable[None]]) -> str:
        """Run a step. Returns why it failed; "" if it succeeded."""
        try:
            await step()
        except (CoatcheckError, RayError) as error:
            return str(error)
        return ""

    async def _scale(self) -> None:
        if self._pending.scale:
            groups, wanted = self.config.groups, self._wanted_groups
            if wanted != self._groups.size:
                await self._groups.scale_groups(wanted, _DRAIN_SECONDS)
            self._pending.scale = self.config.groups != groups  # it may have changed meanwhile
            self._publish()

    @property
    def _wanted_groups(self) -> int:
        """The number of groups to scale to. With autoscaling `groups` is the minimum, and groups beyond it stay until
        the autoscaler removes them: the load may need them."""
        groups, max_groups = self.config.groups, self.config.max_groups
        return groups if max_groups is None else min(max(self._groups.size, groups), max_groups)

    async def _restart_groups(self) -> None:
        """Restart each group that still has the former settings. A group that was started since has the new ones."""
        for name in sorted(self._pending.groups):
            if (start := self._pending.groups.get(name)) is None:
                continue  # the settings have changed again meanwhile, and the group was removed before that
            runs = {state.name: state.restarts for state in self._groups.states}
            if runs.get(name) == start:
                await self._groups.restart_group(name, _DRAIN_SECONDS)
            if self._pending.groups.get(name) == start:  # else the settings have changed again meanwhile
                del self._pending.groups[name]
            self._publish()

    async def _restart_routers(self) -> None:
        """Restart each router that still has the former settings. A router that does not serve starts with the new
        ones, unless a former supervisor has started it, and this one has not reached it yet."""
        pending = self._pending.routers
        for address in tuple(pending):
            if address in self._routers.addresses:
                await self._routers.restart_router(address, _DRAIN_SECONDS)
            elif name := self._unreached_router():
                raise Unavailable(f"{name} has not answered yet")
            if self._pending.routers is not pending:  # the settings have changed again meanwhile
                return
            pending.remove(address)
            self._publish()

    def _unreached_router(self) -> str:
        """A router that may run and has not answered this supervisor yet; "" if there is none."""
        states = self._routers.states
        if states is None:
            return "a router"
        return next((router.name for router in states if router.state == "starting"), "")

    def _add_pending(self, groups: Sequence[str], routers: Sequence[str], *, scale: bool) -> None:
        if self._pending.is_empty:
            self._pending.reasons = []
        if groups:
            self._pending.groups = {state.name: state.restarts for state in self._groups.states}
        if routers:
            self._pending.routers = self._routers.addresses
        self._pending.scale = self._pending.scale or scale
        self._pending.reasons += [
            name for name in dict.fromkeys([*groups, *routers]) if name not in self._pending.reasons
        ]

    def _publish(self) -> None:
        """Store the pending steps, and send their description to the routers, which report it in their status."""
        StoredRollout(self.config, self._pending).write()
        self._routers.set_configuration(self.status)
