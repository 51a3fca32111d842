"""Groups are restarted one at a time, while others are added and removed."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.bench.setup.ray_nodes import RayNodes
from coatcheck.proto.errors import NotFound, Unavailable
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving
from tests.cluster.supervision.fake_ranks import FakeRanks
from tests.cluster.supervision.supervised_cluster import Cluster


async def test_a_group_is_added_while_another_is_restarted(cluster: Cluster) -> None:
    """A restart that drains a busy group delays no new group. The group that is being added cannot be restarted."""
    actor = cluster.supervisor
    cluster.router.waiting = 5
    restart = asyncio.create_task(actor.restart_group("group-1", 2.0))
    await cluster.until("group-1", "draining")
    await asyncio.wait_for(actor.scale_groups(3, 1.0), MAX_WAIT_SECONDS)
    assert (await cluster.states())["group-2"] == "serving" and not restart.done()
    await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
    assert cluster.ranks["group-1"].graceful_stops == 1


def load_slowly(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The next start of `ranks` sets the first event, and serves once the second one is set."""
    is_loading, is_loaded = asyncio.Event(), asyncio.Event()

    async def load() -> None:
        is_loading.set()
        await is_loaded.wait()
        ranks.is_running = True

    monkeypatch.setattr(ranks, "run_ranks", load)
    return is_loading, is_loaded


async def test_groups_are_removed_while_another_loads(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart whose ranks load for minutes delays no removal. The last group that serves stays meanwhile, and another
    restart waits."""
    actor = cluster.supervisor
    await actor.scale_groups(3, 1.0)
    is_loading, is_loaded = load_slowly(cluster.ranks["group-0"], monkeypatch)
    restart = asyncio.create_task(actor.restart_group("group-0", 1.0))
    await asyncio.wait_for(is_loading.wait(), MAX_WAIT_SECONDS)
    await asyncio.wait_for(actor.scale_groups(2, 1.0), MAX_WAIT_SECONDS)
    assert await cluster.states() == {"group-0": "starting", "group-1": "serving"}
    with pytest.raises(Unavailable, match="none of group-0 serves, and requests would be refused"):
        await asyncio.wait_for(actor.scale_groups(1, 1.0), MAX_WAIT_SECONDS)
    with pytest.raises(NotFound, match="there is no group 'group-2'"):
        await asyncio.wait_for(actor.restart_group("group-2", 1.0), MAX_WAIT_SECONDS)
    second = asyncio.create_task(actor.restart_group("group-1", 1.0))
    await asyncio.sleep(0.05)
    assert not restart.done() and (await cluster.states())["group-1"] == "serving"
    is_loaded.set()
    for waiting in (restart, second):
        await asyncio.wait_for(waiting, MAX_WAIT_SECONDS)
    assert await cluster.states() == {"group-0": "serving", "group-1": "serving"}
    assert [cluster.ranks[name].graceful_stops for name in ("group-0", "group-1")] == [1, 1]


async def test_a_group_is_removed_while_it_is_restarted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that loads, or drains before that, can be removed. Its restart then fails at once, with this reason."""
    actor = cluster.supervisor
    is_loading, _ = load_slowly(cluster.ranks["group-1"], monkeypatch)
    restart = asyncio.create_task(actor.restart_group("group-1", 1.0))
    await asyncio.wait_for(is_loading.wait(), MAX_WAIT_SECONDS)
    await asyncio.wait_for(actor.scale_groups(1, 1.0), MAX_WAIT_SECONDS)
    with pytest.raises(NotFound, match="there is no group 'group-1'; there are group-0"):
        await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
    cluster.ranks.pop("group-1")
    await actor.scale_groups(2, 1.0)
    cluster.router.waiting = 5
    restart = asyncio.create_task(actor.restart_group("group-1", 1000.0))
    await cluster.until("group-1", "draining")
    await asyncio.wait_for(actor.scale_groups(1, 0.0), MAX_WAIT_SECONDS)
    with pytest.raises(NotFound, match="there is no group 'group-1'; there are group-0"):
        await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
    assert await cluster.states() == {"group-0": "serving"}


async def test_a_restart_and_a_removal_drain_the_same_group(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is to be removed gets no new requests after its restart. If the removal is given up, the group
    serves once its restart is complete."""
    actor = cluster.supervisor
    await actor.scale_groups(3, 1.0)
    cluster.router.waiting = 5
    for gives_up_first in (True, False):
        is_loading, is_loaded = load_slowly(cluster.ranks["group-2"], monkeypatch)
        restart = asyncio.create_task(actor.restart_group("group-2", 0.2))
        await cluster.until("group-2", "draining")
        removal = asyncio.create_task(actor.scale_groups(1, 1000.0))
        await cluster.until("group-1", "draining")
        if gives_up_first:
            await asyncio.wait_for(actor.scale_groups(3, 1.0), MAX_WAIT_SECONDS)
            assert (await cluster.states())["group-2"] != "serving"
        await asyncio.wait_for(is_loading.wait(), MAX_WAIT_SECONDS)
        is_loaded.set()
        await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
        assert (await cluster.states())["group-2"] == ("serving" if gives_up_first else "draining")
        await asyncio.wait_for(actor.scale_groups(3, 1.0), MAX_WAIT_SECONDS)
        with pytest.raises(Unavailable, match="the removal of group-1, group-2 was given up"):
            await asyncio.wait_for(removal, MAX_WAIT_SECONDS)
        assert set((await cluster.states()).values()) == {"serving"}


async def test_a_group_that_is_being_added_is_not_restarted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be removed again if another new group does not start. Therefore it does not replace the last group that
    serves either."""
    await cluster.supervisor.scale_groups(1, 1.0)
    is_connected = asyncio.Event()
    monkeypatch.setattr(cluster.supervisor._routers, "wait_until_connected", lambda group: is_connected.wait())
    scaling = asyncio.create_task(cluster.supervisor.scale_groups(2, 1.0))
    await cluster.until("group-1", "serving")
    with pytest.raises(Unavailable, match="group-1 is being added; wait until it serves"):
        await cluster.supervisor.restart_group("group-1", 1.0)
    with pytest.raises(Unavailable, match="no group but group-0 serves"):
        await cluster.supervisor.restart_group("group-0", 1.0)
    is_connected.set()
    await scaling


async def test_a_group_is_restarted(cluster: Cluster) -> None:
    """`restart_group` replaces the ranks of one group. It refuses unknown groups, and the last group that serves."""
    actor = cluster.supervisor
    await actor.restart_group("group-1", 1.0)
    assert cluster.ranks["group-1"].graceful_stops == 1 and cluster.ranks["group-0"].graceful_stops == 0
    assert (await cluster.states())["group-1"] == "serving"
    with pytest.raises(NotFound, match="there is no group 'x'; there are group-0, group-1"):
        await actor.restart_group("x", 1.0)
    await actor.scale_groups(1, 1.0)
    with pytest.raises(Unavailable, match="no group but group-0 serves"):
        await actor.restart_group("group-0", 1.0)


@pytest.mark.ray
@pytest.mark.full  # a start of three groups, and one of them again
def test_groups_are_scaled_while_a_real_one_loads(tmp_path: Path, tiny_model: Path) -> None:
    """`coatcheck scale` ends while a group that is restarted still loads, here in a suspended process. The group serves
    later."""
    with RayNodes(tmp_path, head_cpus=3) as nodes:
        flags = ["--groups", "3", "--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]
        with (
            Serving(str(tiny_model), *flags, "--ray-address", nodes.address, environment=nodes.environment) as serving,
            ThreadPoolExecutor() as threads,
        ):
            serving.wait_ready()
            before = set(ranks(nodes))
            flags = ["--ray-address", nodes.address, "--drain-seconds", "1"]
            restart = threads.submit(
                coatcheck, "restart", "group-0", *flags, environment=nodes.environment, seconds=3 * MAX_WAIT_SECONDS
            )
            until(lambda: bool(set(ranks(nodes)) - before), "a rank starts", else_tell=nodes.processes)
            (loading,) = set(ranks(nodes)) - before
            os.kill(loading, signal.SIGSTOP)
            try:
                assert serving.group("group-0")["state"] == "starting"
                scaled = coatcheck("scale", "--groups", "2", *flags, environment=nodes.environment)
                assert scaled.returncode == 0 and not restart.done(), scaled.stderr
                states = {group["name"]: group["state"] for group in serving.status()["groups"]}
                assert states == {"group-0": "starting", "group-1": "serving"}
                assert serving.generate("def main", max_tokens=4).group == "group-1"
            finally:
                os.kill(loading, signal.SIGCONT)
            assert restart.result().returncode == 0, restart.result().stderr
            assert serving.group("group-0")["state"] == "serving"


def ranks(nodes: RayNodes) -> list[int]:
    """The process ids of the ranks."""
    return [pid for pid, command in nodes.processes().items() if command.startswith("ray::Rank")]
