"""RouterSupervisor: holds a router up, and tells it of the groups. It does not know how groups come and go."""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import ray
from ray.exceptions import RayError, RayTaskError

from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.supervision.cluster_state import GroupState
from coatcheck.proto.errors import CoatcheckError, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.heartbeat import Heartbeat
from coatcheck.router.groups.group_endpoint import GroupEndpoint

_WATCH_SECONDS = 0.5
_STOP_SECONDS = 5.0
_STOPPED_SECONDS = 30.0
_RESTART_SECONDS = 0.5

_log = logging.getLogger(__name__)


class RouterSupervisor:
    """`address` (gRPC's) and `http_address` are host:port while the router serves; `failure` why it never will."""

    def __init__(
        self, config: RouterConfig, *, has_served: bool, resource: str | None = None, node: str | None = None
    ) -> None:
        self.address = ""
        self.http_address = ""
        self.failure = ""
        self._config = config
        self._resource = resource  # of the nodes where it may run; None: any
        self._node = node  # where it must run, by id; None: anywhere
        self.has_served = has_served  # also before this keeper's time: then it is started again whatever happens
        self._actor: launch.Actor | None = None
        self._groups: list[GroupEndpoint] | None = None  # not yet known
        self._version = 0
        self._serves = asyncio.Event()  # whoever waits for the next start clears it

    async def keep(self) -> None:
        """Holds the router up until cancelled; gives up only on one that has never served."""
        while True:
            try:
                self._actor = launch.find_actor(self._config.name) or self._start()
                address = await self._actor.start.remote()
                self.http_address = await self._actor.http_address.remote()
                self.address = address
                self._serves.set()
                # The next router must be where clients look for this one.
                self._config = replace(
                    self._config, port=int(address.rpartition(":")[2]), http_port=_port(self.http_address)
                )
                self.has_served = True
                self._send_groups()
                await self._watch(self._actor)
            except (RayError, TimeoutError, ValueError) as error:  # ValueError: its name is not free again yet
                _log.error("the router has ended: %r", error)
                cause = error.cause if isinstance(error, RayTaskError) else None
                if not self.has_served:
                    self.failure = str(cause) if isinstance(cause, CoatcheckError) else f"router: {cause or error}"
            self.address = self.http_address = ""
            self._kill()
            if not self.has_served:
                return
            await asyncio.sleep(_RESTART_SECONDS)

    def set_groups(self, states: list[GroupState]) -> None:
        """Sends the groups as they are now, without waiting for an answer."""
        self._groups = [
            GroupEndpoint(
                name=state.name,
                address=state.address,
                state="lost" if state.state == "failed" else state.state,
                reason=state.reason,
                restarts=state.restarts,
                incarnation=state.incarnation,
                predecessor=state.predecessor,
            )
            for state in states
        ]
        # Grows from one supervisor to the next as well: the router ignores a list older than the newest it has seen.
        self._version = time.time_ns()
        self._send_groups()

    async def drain(self) -> bool:
        """Lets no new request in and waits for those that run."""
        if self._actor is None:
            return True
        with suppress(RayError):
            return bool(await self._actor.drain.remote(None))
        return False

    async def load(self, group: str) -> int:
        """Requests that a group has, running or waiting, as far as this router knows; 0 when it does not answer."""
        status = await self.status()
        return sum(one.running + one.waiting for one in status.groups if one.name == group) if status else 0

    async def status(self) -> StatusResponse | None:
        """As the router says; None when it does not answer."""
        if self._actor is not None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    status: StatusResponse = await self._actor.status.remote()
                    return status
        return None

    async def misses(self, groups: Iterable[str]) -> str | None:
        """Which of these groups, that serve, this router does not use, and why; empty when it uses all, None when it
        does not answer."""
        status = await self.status()
        if status is None:
            return None
        known = {one.name: one for one in status.groups}
        for group in groups:
            if group not in known:
                return f"{self._config.name} does not know {group}"
            if known[group].state not in ("serving", "draining", "drained"):
                reason = known[group].reason or f"it is {known[group].state}"
                return f"{self._config.name} does not use {group}: {reason}"
        return ""

    async def renew(self, drain_seconds: float) -> None:
        """Another process at the same address, of whatever is installed now: no new request comes to this one, and
        what runs may end within that time. Returns once the next one serves."""
        if self._actor is None or not self.address:
            raise Unavailable(f"{self._config.name} does not serve; wait until it does")
        await self._actor.drain.remote(drain_seconds)
        self._serves.clear()
        await self.stop(now=False)
        await self._serves.wait()

    async def stop(self, *, now: bool) -> None:
        """Ends the router, first with a word (unless `now`), then without."""
        if self._actor is not None and not now:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._actor.stop.remote()
        self._kill()

    async def _watch(self, actor: launch.Actor) -> None:
        """Raises RayError once the router's process has ended, TimeoutError once it hangs.

        A router that is merely busy is left alone: restarting it would end all of its streams. Sends the groups' states
        after every answer, since a message may fail or overtake another.
        """
        # A router of an earlier version has no `heartbeat`; then its event loop has to answer.
        ask = getattr(actor, "heartbeat", None) or actor.status
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                async with asyncio.timeout(_STOPPED_SECONDS):
                    answer = await ask.remote()
            except TimeoutError:
                raise TimeoutError(f"its process has not answered for {_STOPPED_SECONDS:g} s") from None
            if isinstance(answer, Heartbeat) and answer.hang_reason:
                raise TimeoutError(answer.hang_reason)
            self._send_groups()

    def _start(self) -> launch.Actor:
        return launch.start_router(self._config, self._resource, self._node)

    def _send_groups(self) -> None:
        if self._actor is not None and self.address and self._groups is not None:
            self._actor.set_groups.remote(self._groups, self._version)

    def _kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None


def _port(address: str) -> int | None:
    return int(address.rpartition(":")[2]) if address else None
