"""FakeRouterActor: stands in for the handle of a RouterActor in the tests of supervision. No process and no Ray."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ray.exceptions import RayActorError

from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint


class FakeMethod:
    """A method of a Ray actor."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, *arguments: object) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self._call(*arguments))


class FakeRouterActor:
    """Serves at once, and connects to every group that it is told of. `waiting`: requests that wait in each group.
    `drained`: groups that an operator has drained."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.groups: list[GroupEndpoint] = []
        self.is_dead = self.has_stopped = False
        self.waiting = 0
        self.drained: set[str] = set()

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(getattr(self, f"_{name}"))

    async def _start(self) -> str:
        return f"host:{self.config.port or 5000}"

    async def _http_address(self) -> str:
        return "host:8000"

    async def _set_groups(self, groups: list[GroupEndpoint], version: int) -> None:
        self.groups = groups

    async def _status(self) -> StatusResponse:
        if self.is_dead:
            raise RayActorError
        states = {group.name: "drained" if group.name in self.drained else group.state for group in self.groups}
        groups = [GroupStatus(name=name, state=state, waiting=self.waiting) for name, state in states.items()]
        return StatusResponse(groups=groups, queue_seconds=0.5 * self.waiting)

    async def _heartbeat(self) -> None:
        if self.is_dead:
            raise RayActorError

    async def _drain(self, timeout_seconds: float | None) -> bool:
        return True

    async def _stop(self) -> None:
        self.has_stopped = self.is_dead = True
