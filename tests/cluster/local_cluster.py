"""LocalCluster: a router and groups of real ranks, as `coatcheck serve` runs them, but without Ray.

A start takes about a second, because the ranks are forked from a process that has torch. Nothing that ends is
restarted.
"""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.workers.core.group_config import GroupConfig
from tests.cluster.running_server import RunningServer
from tests.workers.rank_group import RankGroup


class LocalCluster(RunningServer):
    """A context manager. The router runs in this process, on the event loop of a thread.

    `groups`: the settings of each group. `log_folder`: each rank writes its log to the file NAME-RANK.log there.
    """

    def __init__(self, groups: Sequence[GroupConfig], log_folder: Path | None = None) -> None:
        super().__init__()
        self._configs = groups
        self._log_folder = log_folder
        self._groups: list[RankGroup] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._router: Router | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            for config in self._configs:
                self._groups.append(RankGroup(config, log_folder=self._log_folder))
            endpoints = [
                GroupEndpoint(config.name, group.wait_ready())
                for config, group in zip(self._configs, self._groups, strict=True)
            ]
            self._run(self._start_router(endpoints))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._router is not None:
                self._run(self._router.stop())
        finally:
            for group in self._groups:
                group.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def read_log(self, group: str, rank: int) -> str:
        """What the rank has logged so far."""
        assert self._log_folder is not None
        return (self._log_folder / f"{group}-{rank}.log").read_text()

    async def _start_router(self, groups: Sequence[GroupEndpoint]) -> None:
        """A coroutine, because gRPC's server belongs to the event loop in which the router is made."""
        config = self._configs[0]
        self._router = Router(RouterConfig(config.model, config.served_model_name, http_port=0))
        self.address = await self._router.start()
        self.url = f"http://{self._router.http_address}"
        await self._router.set_groups(groups)
        while len(self._router.groups.serving()) < len(groups):
            await self._router.groups.next_change.wait()

    def _run(self, operation: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(operation, self._loop).result(MAX_WAIT_SECONDS)
