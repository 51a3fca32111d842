"""Other settings for a running cluster: what is done, in which order, what is said, and what a restart remembers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import ray_kv
from coatcheck.cluster.ray_cluster.cluster_state import GroupState, RouterState
from coatcheck.cluster.supervision import config_rollout
from coatcheck.cluster.supervision.config_rollout import ConfigRollout, Pending, StoredRollout, read_rollout
from coatcheck.proto.errors import Unavailable


def settings(**changed: object) -> ServeConfig:
    return ServeConfig.build({"model": "m", "groups": 2, **changed})


class FakeGroups:
    """Two groups. `calls`: what was asked of them. `error`: why restarts and scalings are impossible, or ""."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.error = ""
        self.states = [GroupState(name, "serving") for name in ("group-0", "group-1")]
        self.config: ServeConfig | None = None

    @property
    def size(self) -> int:
        return len(self.states)

    def set_config(self, config: ServeConfig) -> None:
        self.config = config

    def start_again(self, group: str) -> None:
        self.states = [replace(one, restarts=one.restarts + (one.name == group)) for one in self.states]

    async def restart_group(self, group: str, drain_seconds: float) -> None:
        if self.error:
            raise Unavailable(self.error)
        self.calls.append(f"restart {group}")
        self.start_again(group)

    async def scale_groups(self, groups: int, drain_seconds: float) -> None:
        if self.error:
            raise Unavailable(self.error)
        self.calls.append(f"scale {groups}")
        self.states = [GroupState(f"group-{index}", "serving") for index in range(groups)]


class FakeRouters:
    """Two routers. `said`: the newest text of their status. `on_restart` is called while a router starts again, and
    `on_restarted` once it serves and before the restart is complete."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.addresses = ["a:1", "b:1"]
        self.states: tuple[RouterState, ...] | None = ()
        self.on_restart: Callable[[str], object] = lambda address: None
        self.on_restarted: Callable[[str], object] = lambda address: None
        self.said = ""
        self.config: ServeConfig | None = None

    def set_config(self, config: ServeConfig) -> None:
        self.config = config

    def set_configuration(self, text: str) -> None:
        self.said = text

    async def restart_router(self, address: str, drain_seconds: float) -> None:
        self.calls.append(f"restart {address}")
        self.addresses = [other for other in self.addresses if other != address]
        self.on_restart(address)
        await asyncio.sleep(0)
        self.addresses = sorted([*self.addresses, address])
        self.on_restarted(address)


class Cluster:
    """A rollout, the fakes that it changes, and Ray's key-value store."""

    def __init__(self, store: dict[str, object]) -> None:
        self.store = store
        self.calls: list[str] = []
        self.groups, self.routers = FakeGroups(self.calls), FakeRouters(self.calls)
        self.rollout = self.start(StoredRollout(settings(), Pending()))

    def start(self, stored: StoredRollout) -> ConfigRollout:
        """Another supervisor's rollout."""
        live: Callable[[ServeConfig], None] = lambda config: self.calls.append(f"live {config.max_groups}")  # noqa: E731
        self.rollout = ConfigRollout(stored, self.groups, self.routers, live)
        self._task: Awaitable[None] = asyncio.ensure_future(self.rollout.run_forever())
        return self.rollout

    def stop(self) -> None:
        assert isinstance(self._task, asyncio.Task)
        self._task.cancel()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not holds():  # noqa: ASYNC110  # what it waits for has no event
                await asyncio.sleep(0.001)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    store: dict[str, object] = {}
    for name in ("number", "text"):
        monkeypatch.setattr(ray_kv, f"read_{name}", store.get)
        monkeypatch.setattr(ray_kv, f"write_{name}", store.__setitem__)
    monkeypatch.setattr(config_rollout, "_RETRY_SECONDS", 0.001)
    cluster = Cluster(store)
    yield cluster
    cluster.stop()


async def test_groups_then_routers_start_again_one_after_another(cluster: Cluster) -> None:
    """Each once; meanwhile the status names those that wait and the settings, and then nothing."""
    assert cluster.rollout.apply(settings(kv_memory="1GiB", max_queued=5)) == ""
    waits = "a restart of group-0, group-1, the router at a:1, the router at b:1 for kv-memory, max-queued"
    assert cluster.rollout.status == cluster.routers.said == f"waits for {waits}"
    assert cluster.groups.config == cluster.routers.config == settings(kv_memory="1GiB", max_queued=5)
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart group-0", "restart group-1", "restart a:1", "restart b:1"]
    await cluster.until(lambda: not cluster.routers.said)


async def test_the_number_of_groups(cluster: Cluster) -> None:
    """It changes only if the settings' own number changed: what `coatcheck scale` did otherwise stays."""
    await cluster.groups.scale_groups(5, 0)
    cluster.rollout.apply(settings(max_queued=5))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.groups.size == 5
    cluster.rollout.apply(settings(max_queued=5, groups=3))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.groups.size == 3 and cluster.calls[-1] == "scale 3"


@pytest.mark.parametrize(("changed", "size"), [({"groups": 3}, 4), ({"groups": 5}, 5), ({"groups": 1}, 4)], ids=str)
async def test_the_minimum_of_an_autoscaled_cluster(cluster: Cluster, changed: dict[str, object], size: int) -> None:
    """With `max-groups`, `groups` is the minimum: another minimum removes no group that the load may need. The
    autoscaler removes those that are idle."""
    cluster.rollout.apply(settings(max_groups=6))
    await cluster.groups.scale_groups(4, 0)
    cluster.rollout.apply(settings(max_groups=6, **changed))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.groups.size == size


async def test_live_settings_take_effect_at_once(cluster: Cluster) -> None:
    """The autoscaler's, without a restart."""
    cluster.rollout.apply(settings(max_groups=4))
    assert cluster.calls == ["live 4"] and cluster.rollout.status == ""


async def test_a_refusal_changes_nothing_and_stays_visible(cluster: Cluster) -> None:
    """Until settings come that are possible."""
    refusal = cluster.rollout.apply(settings(block_size=32, max_queued=5))
    assert "block-size from 16 to 32" in refusal
    assert cluster.rollout.status == cluster.routers.said == f"refused: {refusal}"
    assert cluster.rollout.config == settings() and cluster.groups.config is None and not cluster.calls
    cluster.rollout.apply(settings())
    assert cluster.rollout.status == cluster.routers.said == ""


async def test_what_is_not_possible_yet_is_tried_again(cluster: Cluster) -> None:
    """The reason is visible. Routers do not wait for groups."""
    cluster.groups.error = "no group but group-0 serves"
    cluster.rollout.apply(settings(groups=3, log_format="json"))
    await cluster.until(lambda: "restart b:1" in cluster.calls and "no group but" in cluster.routers.said)
    assert cluster.routers.said == (
        "waits for 3 groups instead of 2 and a restart of group-0, group-1 for log-format (no group but group-0 serves)"
    )
    cluster.groups.error = ""
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.groups.size == 3


async def test_a_group_that_started_by_itself_is_not_restarted(cluster: Cluster) -> None:
    """Its ranks have the new settings already."""
    cluster.groups.error = "wait"
    cluster.rollout.apply(settings(kv_memory="1GiB"))
    cluster.groups.start_again("group-0")
    cluster.groups.error = ""
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart group-1"]


async def test_a_group_may_be_removed_while_settings_change_again(cluster: Cluster) -> None:
    """While a group restarts, `coatcheck scale` removes the last group, and then further settings come. The rollout
    does not look for the removed group."""

    async def restart(group: str, drain_seconds: float) -> None:
        cluster.calls.append(f"restart {group}")
        is_first = cluster.calls == ["restart group-0"]
        cluster.groups.start_again(group)
        if is_first:
            cluster.groups.states = cluster.groups.states[:1]
            cluster.rollout.apply(settings(kv_memory="2GiB"))

    cluster.groups.restart_group = restart  # type: ignore[method-assign]
    cluster.rollout.apply(settings(kv_memory="1GiB"))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart group-0", "restart group-0"]


async def test_the_next_supervisor_goes_on(cluster: Cluster) -> None:
    """It has the newest settings and knows what is still to do; until the groups are scaled it finds those that run."""
    cluster.groups.error = "wait"
    cluster.rollout.apply(settings(groups=3, kv_memory="1GiB"))
    await cluster.until(lambda: "(wait)" in cluster.routers.said)
    cluster.stop()
    assert cluster.store[ray_kv.GROUP_COUNT] == 2
    stored = read_rollout()
    assert stored is not None and stored.config == settings(groups=3, kv_memory="1GiB")
    cluster.groups.error = ""
    cluster.calls.clear()
    cluster.start(stored)
    assert "a restart of group-0, group-1 for kv-memory" in cluster.rollout.status
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls[0] == "scale 3"


async def test_settings_that_change_while_a_router_starts_again(cluster: Cluster) -> None:
    """The roll-out goes on with the newest settings. The router that starts again has them already."""
    cluster.routers.on_restart = lambda address: changes.pop()() if changes else None
    changes = [lambda: cluster.rollout.apply(settings(max_queued=6))]
    cluster.rollout.apply(settings(max_queued=5))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart a:1", "restart b:1"]


async def test_settings_that_change_after_a_router_started_again(cluster: Cluster) -> None:
    """A router that serves with the settings before the newest ones starts once more."""
    cluster.routers.on_restarted = lambda address: changes.pop()() if changes else None
    changes = [lambda: cluster.rollout.apply(settings(max_queued=6))]
    cluster.rollout.apply(settings(max_queued=5))
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart a:1", "restart a:1", "restart b:1"]


@pytest.mark.parametrize("states", [None, (RouterState("router-a"),)], ids=["nodes unknown", "router unreached"])
async def test_the_next_supervisor_waits_for_the_routers_that_run(
    cluster: Cluster, states: tuple[RouterState, ...] | None
) -> None:
    """A router that a restarted supervisor has not reached yet still has the former settings: it is restarted later,
    and not left out."""
    cluster.stop()
    cluster.routers.addresses, cluster.routers.states = ["b:1"], states
    cluster.start(StoredRollout(settings(max_queued=5), Pending(routers=["a:1", "b:1"], reasons=["max-queued"])))
    await cluster.until(lambda: "has not answered yet" in cluster.routers.said)
    assert cluster.calls == []
    cluster.routers.addresses, cluster.routers.states = ["a:1", "b:1"], (RouterState("router-a", "serving"),)
    await cluster.until(lambda: not cluster.rollout.status)
    assert cluster.calls == ["restart a:1", "restart b:1"]
