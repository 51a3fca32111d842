"""RouterSupervisor: keeps one router running, and sends it the state of every group."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

from ray.exceptions import RayError, RayTaskError

from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.actor_handles import RouterHandle
from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.proto.errors import CoatcheckError, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint

_WATCH_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_HANG_SECONDS = 30.0
_RESTART_SECONDS = 0.5

_log = logging.getLogger(__name__)


class RouterSupervisor:
    """Supervises one router.

    `address` (gRPC) and `http_address` are host:port while the router serves, else "". `failure`: why the router will
    never serve, else "". `has_served`: whether any router has served; if so, this router is always restarted.
    `resource`: a Ray resource of the nodes where it may run. `node`: the id of the node where it must run.
    """

    def __init__(
        self, config: RouterConfig, *, has_served: bool, resource: str | None = None, node: str | None = None
    ) -> None:
        self.address = ""
        self.http_address = ""
        self.failure = ""
        self.has_served = has_served
        self._config = config
        self._resource = resource
        self._node = node
        self._actor: RouterHandle | None = None
        self._groups: list[GroupEndpoint] | None = None  # None: not known yet
        self._version = 0
        self._serves = asyncio.Event()  # cleared by `restart_router`, to wait for the next start

    def restore_ports(self) -> None:
        """Have the router listen at the ports that it chose under a former supervisor."""
        grpc_port = ray_kv.read_number(ray_kv.grpc_port_key(self._config.name))
        http_port = ray_kv.read_number(ray_kv.http_port_key(self._config.name))
        if grpc_port and not self._config.port:
            self._config = replace(self._config, port=grpc_port)
        if http_port and self._config.http_port == 0:
            self._config = replace(self._config, http_port=http_port)

    def forget_ports(self) -> None:
        """Delete the ports that the next supervisor would restore."""
        ray_kv.delete_number(ray_kv.grpc_port_key(self._config.name))
        ray_kv.delete_number(ray_kv.http_port_key(self._config.name))

    async def supervise_router(self) -> None:
        """Keep the router running until cancelled. Returns only if a router that has never served cannot start."""
        while True:
            try:
                await self._watch(await self._start())
            except (RayError, TimeoutError, ValueError) as error:  # ValueError: Ray has not freed its name yet
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
        """Send the state of every group to the router. Does not wait for an answer."""
        self._groups = [
            GroupEndpoint(
                name=state.name,
                address=state.address,
                state="lost" if state.state == "failed" else state.state,
                reason=state.reason,
                restarts=state.restarts,
                incarnation=state.incarnation,
                previous_crash=state.previous_crash,
                last_failure=state.last_failure,
            )
            for state in states
        ]
        # The router ignores a list that is older than its own. The clock, unlike a counter, keeps increasing when the
        # supervisor restarts.
        self._version = time.time_ns()
        self._send_groups()

    async def drain_router(self) -> bool:
        """Refuse new requests and wait for those that run. Returns whether the router is drained."""
        if self._actor is None:
            return True
        with suppress(RayError):
            return await self._actor.drain.remote(None)
        return False

    async def restart_router(self, drain_seconds: float) -> None:
        """Start another process at the same address. The old process refuses new requests, and its running requests
        have `drain_seconds` to end. Returns once the new process serves."""
        if self._actor is None or not self.address:
            raise Unavailable(f"{self._config.name} does not serve; wait until it does")
        await self._actor.drain.remote(drain_seconds)
        self._serves.clear()
        await self.stop_router(now=False)
        await self._serves.wait()

    async def stop_router(self, *, now: bool) -> None:
        """End the router's process. `now`: kill it at once."""
        if self._actor is not None and not now:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._actor.stop.remote()
        self._kill()

    async def read_status(self) -> StatusResponse | None:
        """The router's status; None if it does not answer within 5 s."""
        if self._actor is not None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return await self._actor.status.remote()
        return None

    async def _start(self) -> RouterHandle:
        """Find the running router, or start it. Return once it serves."""
        actor = launch.find_router(self._config.name)
        if actor is None:
            actor = launch.start_router(self._config, self._resource, self._node)
        self._actor = actor
        address = await actor.start.remote()
        http_address = await actor.http_address.remote()
        self._keep_ports(address, http_address)
        self.http_address = http_address
        self.address = address
        self._serves.set()
        self.has_served = True
        self._send_groups()
        return actor

    def _keep_ports(self, address: str, http_address: str) -> None:
        """Have the next process, also under another supervisor, listen at the same ports, which clients know."""
        port = int(address.rpartition(":")[2])
        http_port = int(http_address.rpartition(":")[2]) if http_address else None
        if not self._config.port:
            ray_kv.write_number(ray_kv.grpc_port_key(self._config.name), port)
        if http_port and not self._config.http_port:
            ray_kv.write_number(ray_kv.http_port_key(self._config.name), http_port)
        self._config = replace(self._config, port=port, http_port=http_port)

    async def _watch(self, actor: RouterHandle) -> None:
        """Raises RayError once the router's process has ended, TimeoutError once it hangs.

        A router that is only busy is not restarted, because that would end all of its streams. Sends the groups' states
        after every answer, because a message may be lost or overtake another.
        """
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                async with asyncio.timeout(_HANG_SECONDS):
                    heartbeat = await actor.heartbeat.remote()
            except TimeoutError:
                raise TimeoutError(f"its process has not answered for {_HANG_SECONDS:g} s") from None
            if heartbeat is not None and heartbeat.hang_reason:
                raise TimeoutError(heartbeat.hang_reason)
            self._send_groups()

    def _send_groups(self) -> None:
        if self._actor is not None and self.address and self._groups is not None:
            self._actor.set_groups.remote(self._groups, self._version)

    def _kill(self) -> None:
        if self._actor is not None:
            launch.kill_actor(self._actor)
            self._actor = None
