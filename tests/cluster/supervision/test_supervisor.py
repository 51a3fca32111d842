"""The supervisor starts, scales, restarts and stops a cluster of fake ranks and fake routers."""

import asyncio
import logging
import threading
from functools import partial

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources
from coatcheck.cluster.supervision import autoscaler, poll_interval, supervisor
from coatcheck.cluster.supervision.autoscaler import AutoscaleRule
from coatcheck.proto.errors import InvalidConfig, Unavailable
from tests.cluster.supervision.fake_ranks import FakeRanks
from tests.cluster.supervision.supervised_cluster import Cluster


async def test_a_cluster_starts_and_ends(cluster: Cluster) -> None:
    """All groups serve and the router is connected to them. `stop_all` leaves nothing in Ray."""
    actor = cluster.supervisor
    assert await cluster.states() == {"group-0": "serving", "group-1": "serving"}
    assert [group.name for group in cluster.router.groups] == ["group-0", "group-1"]
    assert (await actor.get_config()).groups == 2 and cluster.placed == {"group-0", "group-1"}
    assert await actor.drain_routers()
    await actor.stop_all()
    assert cluster.router.has_stopped and not cluster.placed and not cluster.numbers
    assert not any(ranks.is_running for ranks in cluster.ranks.values())


async def test_a_group_that_a_router_misses_is_checked_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router reports that it is not connected to a group. The ranks of this group are checked now, and those of the
    other group when their check is due."""
    cluster.router.missing = ("group-0",)
    reports = cluster.router.reports
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while cluster.router.reports < reports + 2:  # noqa: ASYNC110  # one report may be older than `missing`
            await asyncio.sleep(0.01)
    monkeypatch.setattr(poll_interval, "_CALLS_PER_SECOND", 1e-6)  # no check is due within this test
    before = {name: ranks.checks for name, ranks in cluster.ranks.items()}
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while cluster.ranks["group-0"].checks < before["group-0"] + 10:  # noqa: ASYNC110  # a check has no event
            await asyncio.sleep(0.01)
    assert cluster.ranks["group-1"].checks <= before["group-1"] + 1, "one wait may have begun before"


async def test_a_cluster_is_scaled(cluster: Cluster) -> None:
    """`scale_groups` adds groups and removes the last ones again. The number is stored for the next supervisor."""
    actor = cluster.supervisor
    await actor.scale_groups(3, 1.0)
    assert (await cluster.states())["group-2"] == "serving" and (await actor.get_config()).groups == 3
    assert cluster.numbers[ray_kv.GROUP_COUNT] == 3 and "group-2" in {group.name for group in cluster.router.groups}
    await actor.scale_groups(1, 1.0)
    assert await cluster.states() == {"group-0": "serving"} and cluster.placed == {"group-0"}
    assert cluster.numbers[ray_kv.GROUP_COUNT] == 1 and not cluster.ranks["group-2"].is_running
    # If group-2 is added again, its ranks must not get the names of the former ranks.
    assert ray_kv.start_number_key("group-2") in cluster.numbers
    with pytest.raises(InvalidConfig, match="groups is 0; it must be at least 1"):
        await actor.scale_groups(0, 1.0)
    with pytest.raises(InsufficientResources, match="2 missing"):
        await actor.scale_groups(5, 1.0)
    await actor.stop_all()
    assert not cluster.numbers


async def test_groups_are_added_while_others_drain(cluster: Cluster) -> None:
    """A removal that drains a busy group for minutes is given up when more groups are wanted: its groups serve at once,
    and further groups are added. Its command fails, and says why."""
    actor = cluster.supervisor
    await actor.scale_groups(3, 1.0)
    cluster.router.waiting = 5
    for wanted in (3, 2, 3):
        removal = asyncio.create_task(actor.scale_groups(1, 1000.0))
        await cluster.until("group-1", "draining")
        assert (await actor.get_config()).groups == 1 and cluster.numbers[ray_kv.GROUP_COUNT] == 3
        scaling = asyncio.create_task(actor.scale_groups(wanted, 0.0 if wanted == 2 else 1000.0))
        with pytest.raises(Unavailable, match="the removal of group-1, group-2 was given up, because more groups"):
            await asyncio.wait_for(removal, MAX_WAIT_SECONDS)
        await asyncio.wait_for(scaling, MAX_WAIT_SECONDS)
        assert await cluster.states() == {f"group-{number}": "serving" for number in range(wanted)}
        assert (await actor.get_config()).groups == cluster.numbers[ray_kv.GROUP_COUNT] == wanted
        if wanted == 2:
            await actor.scale_groups(3, 1.0)


async def test_a_removal_that_waits_is_given_up_too(cluster: Cluster) -> None:
    """The command that was given last counts. A removal that has waited for a restart, or for another removal, begins
    no drain once more groups were wanted."""
    actor = cluster.supervisor
    await actor.scale_groups(3, 1.0)
    cluster.router.waiting = 5
    first = asyncio.create_task(actor.scale_groups(2, 1000.0))
    await cluster.until("group-2", "draining")
    second = asyncio.create_task(actor.scale_groups(2, 1000.0))
    restart = asyncio.create_task(actor.restart_group("group-1", 0.5))
    third = asyncio.create_task(actor.scale_groups(1, 1000.0))
    await asyncio.sleep(0)
    await asyncio.wait_for(actor.scale_groups(3, 1.0), MAX_WAIT_SECONDS)
    for removal, names in ((first, "group-2"), (second, "group-2"), (third, "group-1, group-2")):
        with pytest.raises(Unavailable, match=f"the removal of {names} was given up, because more groups are wanted"):
            await asyncio.wait_for(removal, MAX_WAIT_SECONDS)
    await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
    assert await cluster.states() == {f"group-{number}": "serving" for number in range(3)}


async def test_the_last_group_that_is_not_drained_stays(cluster: Cluster) -> None:
    """`scale_groups` and `restart_group` refuse to leave only drained groups, and name the command that ends a
    drain."""
    actor = cluster.supervisor
    cluster.router.drained = {"group-0"}
    for change in (actor.scale_groups(1, 1.0), actor.restart_group("group-1", 1.0)):
        with pytest.raises(Unavailable, match="has drained group-0, .* run `coatcheck drain group-0 --undo`"):
            await change
    assert await cluster.states() == {"group-0": "serving", "group-1": "serving"}
    await actor.restart_group("group-0", 1.0)
    cluster.router.drained = {"group-1"}
    await actor.scale_groups(1, 1.0)
    assert await cluster.states() == {"group-0": "serving"}


async def test_a_group_that_does_not_start_is_removed_again(cluster: Cluster) -> None:
    """If a new group fails, `scale_groups` raises its reason, and the cluster is as before."""
    cluster.ranks["group-2"] = FakeRanks(["ends late"], group="group-2")
    with pytest.raises(Unavailable, match="group-2 does not start: rank 0 has ended: out of memory"):
        await cluster.supervisor.scale_groups(3, 1.0)
    assert await cluster.states() == {"group-0": "serving", "group-1": "serving"}
    assert cluster.numbers[ray_kv.GROUP_COUNT] == 2 and "group-2" not in cluster.placed
    assert (await cluster.supervisor.get_state()).failure == ""


async def test_other_settings_reach_groups_and_routers(cluster: Cluster) -> None:
    """Each group starts again with them, the router says nothing waits any more, and the next `serve` reads them. What
    is impossible is said, and the store is empty once the cluster has ended."""
    wanted = ServeConfig.build({"model": "m", "groups": 2, "tp": 2, "max_num_seqs": 7})
    assert await cluster.supervisor.apply_config(wanted) == ""
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while (await cluster.supervisor.get_state()).configuration:  # noqa: ASYNC110  # the state has no event
            await asyncio.sleep(0.01)
    assert await cluster.supervisor.get_config() == wanted
    for ranks in cluster.ranks.values():
        assert ranks.config is not None and ranks.config.max_num_seqs == 7 and len(ranks.starts) == 2
    refusal = await cluster.supervisor.apply_config(wanted.model_copy(update={"tp": 1}))
    assert "tp from 2 to 1" in refusal and (await cluster.supervisor.get_state()).configuration == f"refused: {refusal}"
    assert cluster.texts.keys() == {ray_kv.ROLLOUT}
    await cluster.supervisor.stop_all(now=True)
    assert not cluster.texts


def autoscaled(**changed: object) -> ServeConfig:
    return ServeConfig.build({"model": "m", "groups": 2, "tp": 2, "max_groups": 3, **changed})


@pytest.fixture
def adds_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autoscaler adds a group after a short queue."""
    monkeypatch.setattr(autoscaler, "_SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "AutoscaleRule", partial(AutoscaleRule, grow_hold_seconds=0.01))


@pytest.mark.usefixtures("adds_soon")
async def test_a_group_that_is_being_added_is_kept_when_settings_change(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The autoscaler adds a group, whose model may load for minutes. Another `queue-target` does not end that start,
    and neither does the end of autoscaling."""
    ranks = cluster.ranks["group-2"] = FakeRanks(group="group-2")
    is_loaded = asyncio.Event()
    monkeypatch.setattr(ranks, "read_previous_crash", lambda: None)

    async def load() -> None:
        await is_loaded.wait()
        ranks.is_running = True

    monkeypatch.setattr(ranks, "run_ranks", load)
    monkeypatch.setattr(launch, "request_nodes", lambda bundle, ranks: None)
    cluster.router.waiting = 100
    await cluster.supervisor.apply_config(autoscaled())
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not ranks.starts:  # noqa: ASYNC110  # a start has no event
            await asyncio.sleep(0.01)
    for config in (autoscaled(queue_target=1.0), autoscaled(max_groups=None)):
        assert await cluster.supervisor.apply_config(config) == ""
        await asyncio.sleep(0.05)
    is_loaded.set()
    await cluster.until_serving()
    assert (await cluster.states())["group-2"] == "serving"
    assert len(ranks.starts) == 1 and ranks.graceful_stops == 0


@pytest.mark.usefixtures("adds_soon")
async def test_the_autoscaler_does_not_undo_a_scaling_that_it_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While an operator's `scale --groups 4` waits for Ray, the autoscaler wants 3 groups instead of 2. It decided by a
    number that is outdated when its turn comes, so there are 4."""
    may_scale = threading.Event()

    def free_resources() -> list[tuple[str, dict[str, float]]]:
        may_scale.wait(MAX_WAIT_SECONDS)
        return [("node", {"CPU": 12.0})]

    monkeypatch.setattr(launch, "free_resources", free_resources)
    monkeypatch.setattr(launch, "request_nodes", lambda bundle, ranks: None)
    caplog.set_level(logging.INFO, logger=autoscaler.__name__)
    cluster.router.waiting = 100
    scaling = asyncio.create_task(cluster.supervisor.scale_groups(4, 1.0))
    await asyncio.sleep(0)
    await cluster.supervisor.apply_config(autoscaled())
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while "2 groups, and 3 wanted" not in caplog.text:  # noqa: ASYNC110  # a log line has no event
            await asyncio.sleep(0.01)
    cluster.router.waiting = 0
    may_scale.set()
    await scaling
    asked = cluster.router.asked
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while cluster.router.asked < asked + 5:  # noqa: ASYNC110  # until the autoscaler measures again
            await asyncio.sleep(0.01)
    assert len(await cluster.states()) == 4
