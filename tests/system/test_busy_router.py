"""A router whose event loop is busy reports that to the supervisor, and is not restarted."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.router_supervisor import RouterSupervisor
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList
from coatcheck.router.actor import RouterActor
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.heartbeat import Heartbeat

pytestmark = pytest.mark.ray

_PLAIN: Any = RouterActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray has made it an actor class


def _compute(over: Path) -> None:
    while not over.exists():
        sum(range(10_000))


async def _silent(actor: Any, seconds: float, busy: float = 0.0) -> Heartbeat:
    """Return the heartbeat once the loop has been silent for `seconds`, and has computed for `busy` seconds of them."""
    heartbeat: Heartbeat = (await actor.report.remote()).heartbeat
    while heartbeat.silent_seconds < seconds or heartbeat.busy_seconds < busy:
        await asyncio.sleep(0.1)
        heartbeat = (await actor.report.remote()).heartbeat
    return heartbeat


@ray.remote(num_cpus=0, concurrency_groups={"heartbeat": 1})  # type: ignore[call-overload]
class BusyRouter(_PLAIN):  # type: ignore[misc]  # as above
    """A router that can be kept busy."""

    async def compute(self, path: str) -> None:
        """Blocks the event loop until the file exists."""
        _compute(Path(path))


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local Ray of this process. Unless the mode is set, Ray writes a token to the home folder and sets variables
    that the commands of later tests inherit."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    node: Any = ray._private.worker._global_node
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    yield
    ray.shutdown()
    for process in processes:  # Ray kills its processes, and on a busy machine does not wait for their end
        process.wait()


@pytest.mark.usefixtures("own_ray")
async def test_a_busy_router_is_not_restarted(tiny_model: Path, tmp_path: Path) -> None:
    """While the event loop computes it answers no call, but its heartbeat says that it is busy. So the supervisor does
    not restart the router."""
    config = RouterConfig(str(tiny_model))
    actor = BusyRouter.remote(config)
    await actor.start.remote()
    computing = actor.compute.remote(str(tmp_path / "over"))
    heartbeat = await _silent(actor, 3.0, busy=0.3)  # takes longer where other processes use the processor
    assert not heartbeat.hang_reason
    supervisor = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.05), has_served=True)
    watch = asyncio.create_task(supervisor._watch(actor))
    await _silent(actor, 6.0)
    assert not watch.done()
    (tmp_path / "over").touch()
    await computing
    await actor.status.remote()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    ray.kill(actor)
