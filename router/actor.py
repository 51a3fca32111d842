"""RouterActor: a Router as a Ray actor; the only file of `router` that imports Ray.

    actor = RouterActor.options(name=...).remote(config); address = await actor.start.remote()

Ray runs the methods on the actor's event loop. No token passes through Ray.
"""

import asyncio
import gc
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from coatcheck.proto.log_lines import configure_logging
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.access.connection_limits import raise_open_files_limit
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.heartbeat import Heartbeat, LoopHeartbeat
from coatcheck.router.groups.group_list import GroupListVersion

if TYPE_CHECKING:
    from coatcheck.router.server import Router


@dataclass(frozen=True)
class RouterReport:
    """The state of a router, which the supervisor reads regularly.

    `heartbeat`: whether the event loop makes progress. `groups`: the version of the router's list of groups. `missing`:
    names of the groups that the list has as serving and that are not attached. `is_draining`: the router refuses new
    requests, or will soon.
    """

    heartbeat: Heartbeat
    groups: GroupListVersion
    missing: tuple[str, ...] = ()
    is_draining: bool = False


@ray.remote(num_cpus=0, concurrency_groups={"heartbeat": 1})  # type: ignore[call-overload]  # absent from Ray's stubs
class RouterActor:
    """The supervisor creates this actor, sends it the list of groups, and stops it."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        # Ray sends this process's stderr to a file in its session directory.
        configure_logging(config.log_format, router=config.name)
        raise_open_files_limit()
        self._router: Router | None = None
        self._address = ""
        self._starting = asyncio.Lock()
        self._heartbeat: LoopHeartbeat | None = None

    async def log_file(self) -> str:
        """Path of this process's log on its host."""
        return os.readlink("/proc/self/fd/2")

    async def start(self) -> str:
        """Listens; returns the "host:port" of gRPC. A second call returns the same address, so that a new supervisor
        can adopt a running router."""
        # Imported late: `coatcheck serve` and the supervisor also import this file, and would start later.
        from coatcheck.router.server import Router

        async with self._starting:
            if self._router is None:
                router = Router(self._config)
                self._address = await router.start()
                self._router = router
                self._heartbeat = LoopHeartbeat()
                # The objects made so far live as long as the router. Without freeze() each full garbage collection
                # scans them and stops every stream for 0.1 s.
                gc.freeze()
        return self._address

    async def http_address(self) -> str:
        """The "host:port" of HTTP; empty if the router does not listen for HTTP."""
        return self._started().http_address

    async def update_groups(self, update: bytes) -> GroupListVersion:
        """See Router.update_groups. `update`: a pickled GroupListUpdate. The supervisor pickles a change once for all
        routers; Ray would do it for each."""
        return await self._started().update_groups(pickle.loads(update))

    async def set_configuration(self, text: str) -> None:
        """See Router.set_configuration."""
        self._started().set_configuration(text)

    async def status(self) -> StatusResponse:
        """See Router.status."""
        return await self._started().status()

    @ray.method(concurrency_group="heartbeat")
    async def report(self) -> RouterReport | None:
        """None before `start` and after `stop`. Its concurrency group has its own thread, so it returns while the event
        loop is busy."""
        heartbeat, router = self._heartbeat, self._router  # `stop` may clear the attributes meanwhile
        if heartbeat is None or router is None:
            return None
        is_draining = router.traffic.is_draining or router.traffic.will_drain
        return RouterReport(heartbeat.read(), router.groups.version, router.groups.unattached, is_draining)

    async def announce_drain(self) -> None:
        """See Router.announce_drain."""
        self._started().announce_drain()

    async def drain(self, timeout_seconds: float | None = None) -> bool:
        """See Router.drain."""
        return await self._started().drain(timeout_seconds)

    async def undo_drain(self) -> None:
        """See Router.undo_drain."""
        self._started().undo_drain()

    async def stop(self) -> None:
        """See Router.stop; does nothing before `start`."""
        if self._router is not None:
            router, self._router = self._router, None
            if self._heartbeat is not None:
                heartbeat, self._heartbeat = self._heartbeat, None  # a stopped loop would look like a hung one
                heartbeat.close()
            await router.stop(grace_seconds=1.0)

    def _started(self) -> "Router":
        if self._router is None:
            raise RuntimeError("this router has not been started; call start first")
        return self._router
