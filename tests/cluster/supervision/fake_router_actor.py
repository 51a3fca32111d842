"""FakeRouterActor: stands in for the handle of a RouterActor in the tests of supervision. No process and no Ray."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayActorError

from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, StatusResponse
from coatcheck.router.actor import RouterReport
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.heartbeat import Heartbeat
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import NO_LIST, GroupListUpdate, GroupListVersion


class FakeMethod:
    """A method of a Ray actor."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, *arguments: object) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self._call(*arguments))


class FakeRouterActor:
    """Serves at once, and connects to every group that it is told of. `waiting`: requests that wait in each group.
    `drained`: groups that an operator has drained. `updates`: those that came, in order, of which the first `to_lose`
    are lost. `missing`: groups that it reports as missing. `reports`: how many it has made. `unconnected`: groups that
    its status shows as starting. `asked`: number of its statuses. `calls`: announcements, drains and undone drains."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.updates: list[GroupListUpdate] = []
        self.to_lose = 0
        self.held = NO_LIST
        self.missing: tuple[str, ...] = ()
        self.reports = 0
        self._groups: dict[str, GroupEndpoint] = {}
        self.is_dead = self.has_stopped = self.is_draining = False
        self.waiting = 0
        self.configuration = ""
        self.drained: set[str] = set()
        self.unconnected: set[str] = set()
        self.asked = 0
        self.calls: list[str] = []

    @property
    def groups(self) -> list[GroupEndpoint]:
        """The list that the router holds."""
        return list(self._groups.values())

    def __getattr__(self, name: str) -> FakeMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return FakeMethod(getattr(self, f"_{name}"))

    async def _log_file(self) -> str:
        return ""

    async def _start(self) -> str:
        return f"host:{self.config.port or 5000}"

    async def _http_address(self) -> str:
        return "host:8000"

    async def _update_groups(self, pickled: bytes) -> GroupListVersion:
        update: GroupListUpdate = pickle.loads(pickled)
        self.updates.append(update)
        if len(self.updates) <= self.to_lose:
            raise RayActorError
        if update.applies_to(self.held):
            self.held = update.version
            kept = {} if update.base is None else self._groups
            changed = {endpoint.name: endpoint for endpoint in update.endpoints}
            self._groups = {name: kept[name] for name in kept if name not in update.removed} | changed
        return self.held

    async def _set_configuration(self, text: str) -> None:
        self.configuration = text

    async def _status(self) -> StatusResponse:
        if self.is_dead:
            raise RayActorError
        self.asked += 1
        states = {group.name: "drained" if group.name in self.drained else group.state for group in self.groups}
        states |= dict.fromkeys(self.unconnected, "starting")
        groups = [GroupStatus(name=name, state=state, waiting=self.waiting) for name, state in states.items()]
        return StatusResponse(groups=groups, queue_seconds=0.5 * self.waiting)

    async def _report(self) -> RouterReport:
        if self.is_dead:
            raise RayActorError
        self.reports += 1
        return RouterReport(Heartbeat(0.0, 0.0), self.held, self.missing, self.is_draining)

    async def _announce_drain(self) -> None:
        self.calls.append("announce_drain")

    async def _drain(self, timeout_seconds: float | None) -> bool:
        if self.is_dead:
            raise RayActorError
        self.calls.append("drain")
        self.is_draining = True
        return True

    async def _undo_drain(self) -> None:
        if self.is_dead:
            raise RayActorError
        self.calls.append("undo_drain")
        self.is_draining = False

    async def _stop(self) -> None:
        self.has_stopped = self.is_dead = True
