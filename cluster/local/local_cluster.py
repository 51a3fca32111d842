"""LocalCluster: a cluster without Ray on this host. The router runs in this process; each rank is a child process.

    client ──gRPC, HTTP──▶ this process ──gRPC (one Attach stream a group)──▶ rank 0 ══torch.distributed══ rank 1 …
                                └── a socket to each rank: its progress, its error, and the order to stop ──┘

A GroupSupervisor restarts the ranks of a group when one ends, as on Ray. Nothing outlives this process: the kernel
kills the ranks with it, and the router's own children end with their sockets.
"""

import asyncio
import gc
import importlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coatcheck.cluster.config.derived_config import group_config, router_config
from coatcheck.cluster.config.exposure import needs_cluster_certificates
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.local.host_gpus import choose_gpus
from coatcheck.cluster.local.rank_processes import RankProcesses
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole, sign_certificates
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState
from coatcheck.cluster.supervision.group_supervisor import GroupSupervisor
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.versioned_group_list import make_endpoint

if TYPE_CHECKING:
    from coatcheck.router.server import Router

_ROUTER: Final = "router-0"
_CHECK_SECONDS: Final = 0.5  # between two questions to ranks that serve
_STOP_SECONDS: Final = 1.0  # for requests that are still open after draining

_log = logging.getLogger(__name__)


class LocalCluster:
    """Use it inside one event loop: `start`, then `state`, then `stop`. `folder`: for the ranks' logs, private to this
    user. Raises InvalidConfig if this host has too few GPUs."""

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        self.device, gpus = choose_gpus(config)
        self._config = config
        self._certificates = sign_certificates() if needs_cluster_certificates(config) else CertificatesByRole()
        self._router: Router | None = None
        # Of gRPC and of HTTP, once the router listens.
        self._addresses: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._failure = ""
        self._has_changed = asyncio.Event()  # a group, changed since the router was last told
        self._supervisors = [
            GroupSupervisor(
                RankProcesses(
                    group_config(config, name, self.device, self._certificates.group),
                    folder,
                    ranks_before=index * config.tp,
                    ranks_on_host=config.groups * config.tp,
                    gpus=gpus[index * config.tp : (index + 1) * config.tp],
                ),
                PollInterval(_CHECK_SECONDS),
                has_served=False,
                on_change=self._has_changed.set,
            )
            for index, name in enumerate(config.group_names)
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> ClusterState:
        """The groups and the router."""
        groups = tuple(supervisor.state for supervisor in self._supervisors)
        failed = (group.reason for group in groups if group.state == "failed")
        grpc_addresses, http_addresses = self._addresses
        return ClusterState(groups, grpc_addresses, self._failure or next(failed, ""), http_addresses)

    @property
    def is_ready(self) -> bool:
        """Whether every group serves, and the router is connected to each."""
        return (
            self._router is not None
            and self.state.is_ready
            and len(self._router.groups.serving()) == len(self._supervisors)
        )

    async def find_missing_connection(self) -> str:
        """Which group the router does not use, and why; "" if it uses all of them, or does not run yet."""
        if self._router is None:
            return ""
        known = {group.name: group for group in (await self._router.status()).groups}
        for name in self._config.group_names:
            if name in known and known[name].state != "serving":
                return f"the router does not use {name}: {known[name].reason or f'it is {known[name].state}'}"
        return ""

    async def start(self) -> None:
        """Start the ranks, and beside them the router. Returns once the router listens. Raises InvalidConfig if it
        cannot."""
        for supervisor in self._supervisors:
            self._run(supervisor.supervise_group())
        # Imported in a thread, so that the ranks start meanwhile.
        await asyncio.to_thread(importlib.import_module, "coatcheck.router.server")
        from coatcheck.router.server import Router

        self._router = Router(router_config(self._config, _ROUTER, self._config.grpc_port, self._certificates.router))
        address = await self._router.start()
        http_address = self._router.http_address
        self._addresses = (address,), (http_address,) if http_address else ()
        gc.freeze()  # see RouterActor.start
        self._run(self._follow_groups(self._router))

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        assert self._router is not None
        await self._router.drain()

    async def stop(self, *, now: bool) -> None:
        """End the ranks and the router. `now`: kill the ranks at once."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(supervisor.stop_group(now=now) for supervisor in self._supervisors))
        if self._router is not None:
            await self._router.stop(0.0 if now else _STOP_SECONDS)

    async def _follow_groups(self, router: "Router") -> None:
        """Tell the router the state of every group, now and after each change."""
        while True:
            self._has_changed.clear()
            await router.set_groups([make_endpoint(supervisor.state) for supervisor in self._supervisors])
            await self._has_changed.wait()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the caller. An error ends the cluster: see `state.failure`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._record_end)

    def _record_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = str(error)
            _log.error("the cluster has failed", exc_info=error)
