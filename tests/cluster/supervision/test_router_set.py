"""The routers of a cluster are started, restarted, told of the groups and asked for their state, with fake actors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState, GroupState
from coatcheck.cluster.session.serve_lines import Notice, RouterNotices
from coatcheck.cluster.supervision import router_set, router_supervisor
from coatcheck.cluster.supervision.router_set import RouterSet, busy_groups, missing_connection
from coatcheck.cluster.supervision.versioned_group_list import make_endpoint
from coatcheck.proto.errors import NotFound, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_list import GroupListVersion
from tests.cluster.supervision.fake_router_actor import FakeRouterActor

SERVING = GroupState("group-0", "serving", "h:1")
RESUME_KEY = b"k" * 32


@pytest.fixture
def numbers() -> dict[str, int]:
    """Ray's key-value store."""
    return {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int]) -> list[FakeRouterActor]:
    """The routers that were started, in order."""
    started: list[FakeRouterActor] = []

    def start_router(config: RouterConfig, resource: str | None, node: str | None) -> FakeRouterActor:
        started.append(FakeRouterActor(config))
        return started[-1]

    monkeypatch.setattr(ray_kv, "read_number", numbers.get)
    monkeypatch.setattr(ray_kv, "write_number", numbers.__setitem__)
    monkeypatch.setattr(ray_kv, "delete_value", lambda key: numbers.pop(key, None))
    monkeypatch.setattr(launch, "find_router", lambda name: None)
    monkeypatch.setattr(launch, "start_router", start_router)
    monkeypatch.setattr(launch, "kill_actor", lambda actor: setattr(actor, "is_dead", True))
    monkeypatch.setattr(router_set, "_NODE_SECONDS", 0.01)
    monkeypatch.setattr(router_set, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(router_supervisor, "_RESTART_SECONDS", 0.01)
    return started


Supervise = Callable[..., Coroutine[Any, Any, RouterSet]]


@pytest.fixture
async def supervise(started: list[FakeRouterActor]) -> AsyncIterator[Supervise]:
    """Supervises the routers of a configuration until the test ends."""
    running: list[asyncio.Task[None]] = []

    async def run(routers: RouterSet) -> None:
        async with asyncio.TaskGroup() as tasks:
            await routers.supervise_routers(tasks)

    async def supervise(has_served: bool = False, **settings: object) -> RouterSet:
        routers = RouterSet(ServeConfig.build({"model": "m", **settings}), None, RESUME_KEY, has_served=has_served)
        routers.set_groups([SERVING])
        running.append(asyncio.create_task(run(routers)))
        await until(lambda: routers.all_serve)
        return routers

    yield supervise
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110  # RouterSet has no event for its changes
            await asyncio.sleep(0.005)


async def test_a_router_that_ends_is_started_again_at_its_address(
    supervise: Supervise, started: list[FakeRouterActor]
) -> None:
    """A router serves with the groups that it is told of. If its process ends, the next one gets its port and the
    groups. The same holds for a requested restart."""
    routers = await supervise(grpc_port=0)
    await until(lambda: bool(started[0].groups))
    assert routers.addresses == ["host:5000"] and routers.http_addresses == ["host:8000"] and not routers.failure
    started[0].is_dead = True
    await until(lambda: len(started) == 2 and bool(started[1].groups))
    assert started[1].config.port == 5000 and started[1].groups[0].name == "group-0"
    await until(lambda: routers.all_serve)
    with pytest.raises(NotFound, match="no router serves at host:1; there are host:5000"):
        await routers.restart_router("host:1", 0.0)
    await routers.restart_router("host:5000", 0.0)
    assert len(started) == 3 and started[1].has_stopped and routers.all_serve


async def test_all_routers_have_the_same_key_for_resume_tickets(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each router of a cluster accepts the tickets of the others, also after a restart and after new settings."""
    monkeypatch.setattr(launch, "router_nodes", lambda resource: ["a" * 12, "b" * 12])
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=0)
    routers.set_config(ServeConfig.build({"model": "m", "grpc_port": 0, "max_queued": 5}))
    started[0].is_dead = True
    await until(lambda: len(started) == 3 and routers.all_serve)
    assert [(router.config.resume_key, router.config.max_queued) for router in started] == [
        (RESUME_KEY, 1024), (RESUME_KEY, 1024), (RESUME_KEY, 5),
    ]  # fmt: skip


async def test_a_restarted_router_is_waited_for(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart is complete when the new process uses the group that serves: until then another router must not be
    restarted."""
    routers = await supervise(grpc_port=0)
    may_serve = asyncio.Event()

    async def start(self: FakeRouterActor) -> str:
        await may_serve.wait()
        return f"host:{self.config.port}"

    monkeypatch.setattr(FakeRouterActor, "_start", start)
    restart = asyncio.create_task(routers.restart_router("host:5000", 0.0))
    await until(lambda: len(started) == 2)
    started[1].unconnected = {"group-0"}
    may_serve.set()
    await until(lambda: bool(started[1].groups))
    asked = started[1].asked
    await until(lambda: started[1].asked > asked + 1)
    assert not restart.done()
    started[1].unconnected = set()
    await asyncio.wait_for(restart, MAX_WAIT_SECONDS)


async def test_a_router_is_sent_changes_and_nothing_else(supervise: Supervise, started: list[FakeRouterActor]) -> None:
    """The router gets the list once, whole, and then each change. While nothing changes nothing is sent."""
    routers = await supervise()
    (router,) = started
    await until(lambda: router.groups == [make_endpoint(SERVING)])
    before = router.reports
    await until(lambda: router.reports > before + 3)
    routers.set_groups([SERVING])
    await until(lambda: router.reports > before + 6)
    assert [update.base for update in router.updates] == [None]
    other = GroupState("group-1")
    routers.set_groups([SERVING, other])
    await until(lambda: len(router.groups) == 2)
    assert [update.endpoints for update in router.updates[1:]] == [(make_endpoint(other),)]


async def test_a_router_that_missed_changes_gets_them(supervise: Supervise, started: list[FakeRouterActor]) -> None:
    """A lost change comes with the next report. A router with another supervisor's list gets the whole list, also if
    that supervisor's clock was ahead."""
    routers = await supervise()
    (router,) = started
    await until(lambda: bool(router.groups))
    router.to_lose = len(router.updates) + 2
    lost = GroupState("group-0", "lost", reason="it was killed")
    routers.set_groups([lost])
    await until(lambda: router.groups == [make_endpoint(lost)])
    assert [update.base is None for update in router.updates] == [True, False, False, False]
    for held in (GroupListVersion(1, 1), GroupListVersion(router.held.epoch + 10**15, 1)):
        router.held = held
        await until(lambda held=held: router.held > held)  # type: ignore[misc]  # mypy infers no type for `held`
        assert router.updates[-1].base is None


async def test_the_next_supervisor_knows_the_ports_that_routers_chose(
    supervise: Supervise, started: list[FakeRouterActor], numbers: dict[str, int]
) -> None:
    """A router whose process ends together with the supervisor is started again at its ports. Ports that a setting
    fixes are not stored, the ports of an earlier cluster are not used, and none remain after the end."""
    await supervise(grpc_port=0)
    assert numbers == {"coatcheck/router-0/grpc-port": 5000, "coatcheck/router-0/http-port": 8000}
    numbers |= {"coatcheck/router-0/grpc-port": 5001, "coatcheck/router-0/http-port": 8001}
    routers = await supervise(has_served=True, grpc_port=0)
    assert (started[1].config.port, started[1].config.http_port) == (5001, 8001)
    await supervise(has_served=True, grpc_port=5002, http_port="none")
    assert (started[2].config.port, started[2].config.http_port) == (5002, None)
    await supervise(grpc_port=0)
    assert (started[3].config.port, started[3].config.http_port) == (0, 0)
    await routers.stop_routers(now=True)
    assert not numbers


async def test_what_routers_say_is_read_from_all(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest queue and the busy groups are measured. A group that a router does not use is waited for, and then
    named."""
    routers = await supervise()
    await until(lambda: bool(started[0].groups))
    assert await routers.find_missing_connection() == "" and await routers.measure_queue() == (0.0, 0)
    await routers.wait_until_connected("group-0")
    started[0].waiting = 3
    assert await routers.measure_queue() == (1.5, 1)
    monkeypatch.setattr(router_set, "_CONNECT_SECONDS", 0.0)
    with pytest.raises(Unavailable, match="router-0 does not know group-1"):
        await routers.wait_until_connected("group-1")


async def test_each_node_has_a_router_while_it_is_there(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers follow the nodes of the cluster: one starts on a new node, and one whose node is gone is ended."""
    nodes = ["a" * 12, "b" * 12]
    monkeypatch.setattr(launch, "router_nodes", lambda resource: nodes)
    routers = await supervise(router_per_node=True, ray_address="h:1")
    assert [router.config.name for router in started] == ["router-aaaaaaaa", "router-bbbbbbbb"]
    nodes[:] = ["b" * 12, "c" * 12]
    await until(lambda: len(started) == 3 and started[0].is_dead and len(routers.addresses) == 2)
    assert started[2].config.name == "router-cccccccc" and not started[1].is_dead


async def test_what_happens_to_a_router_is_said(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` prints a line, and records an event, for a router that is lost, serves again, drains, ends, comes, or is
    gone with its node. A supervisor that does not know the nodes yet has lost no router."""
    nodes = ["a" * 12, "b" * 12]
    monkeypatch.setattr(launch, "router_nodes", lambda resource: nodes)
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=0)
    notices = RouterNotices(ClusterState(routers=routers.states))
    said: list[Notice] = []

    async def until_said(reason: str, line: str, *, is_warning: bool = False) -> None:
        def is_said() -> bool:
            said.extend(notices.describe_changes(ClusterState(routers=routers.states)))
            return any(notice.reason == reason for notice in said)

        await until(is_said)
        assert said[-1] == Notice(line, reason, is_warning), said
        said.clear()

    monkeypatch.setattr(router_supervisor, "_RESTART_SECONDS", 0.5)  # each state lasts until it is read
    started[0].is_dead = True
    await until_said("RouterLost", "router-aaaaaaaa is lost: its process died", is_warning=True)
    await until_said("RouterServing", "router-aaaaaaaa is serving again; last restart: its process died")
    assert notices.describe_changes(ClusterState(routers=None)) == []
    started[1].is_draining = True
    await until_said("RouterDraining", "router-bbbbbbbb is draining")
    started[1].is_dead = True
    await until_said("RouterEnded", "router-bbbbbbbb has ended while it drained")
    nodes[:] = ["a" * 12]
    await until_said("RouterRemoved", "router-bbbbbbbb is gone with its node")
    nodes.append("c" * 12)
    await until_said("RouterServing", "another router at host:5000")
    nodes.pop()
    await until_said("RouterRemoved", "router-cccccccc is gone with its node", is_warning=True)
    restart = asyncio.create_task(routers.restart_router("host:5000", 0.0))
    await until_said("RouterEnded", "router-aaaaaaaa has ended while it drained")
    await until_said("RouterServing", "router-aaaaaaaa is serving again")
    await restart


async def test_one_router_of_several_is_restarted_in_steps(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load balancers learn first that it will drain, and later that the new process serves, each with time to act. The
    only router of a cluster drains at once: nothing else could take its requests."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def record_sleep(seconds: float) -> None:
        waits.append(seconds)
        await sleep(min(seconds, 0.01))

    nodes = ["a" * 12, "b" * 12]
    monkeypatch.setattr(launch, "router_nodes", lambda resource: nodes)
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=0)
    await until(lambda: all(router.groups for router in started))
    monkeypatch.setattr(asyncio, "sleep", record_sleep)
    await routers.restart_router(routers.addresses[0], 0.0)
    assert started[0].calls == ["announce_drain", "drain"]
    assert waits.index(router_set._ANNOUNCE_SECONDS) < waits.index(router_set._RETURN_SECONDS)
    nodes.pop()
    await until(lambda: len(routers.addresses) == 1)
    waits.clear()
    await routers.restart_router(routers.addresses[0], 0.0)
    assert started[-2].calls == ["drain"] and router_set._ANNOUNCE_SECONDS not in waits


async def test_a_router_that_is_lost_while_it_announces_its_drain(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart fails with the reason, and the roll-out of settings tries again. The next process serves, and is not
    drained."""
    is_lost, has_failed = asyncio.Event(), asyncio.Event()
    sleep = asyncio.sleep

    async def lose_router(seconds: float) -> None:
        if seconds == router_set._ANNOUNCE_SECONDS:
            started[0].is_dead = True
            await is_lost.wait()
        elif seconds == router_supervisor._RESTART_SECONDS:
            is_lost.set()
            await has_failed.wait()
        else:
            await sleep(seconds)

    monkeypatch.setattr(router_supervisor, "_RESTART_SECONDS", 0.02)
    monkeypatch.setattr(launch, "router_nodes", lambda resource: ["a" * 12, "b" * 12])
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=0)
    monkeypatch.setattr(asyncio, "sleep", lose_router)
    with pytest.raises(Unavailable, match="aaaa was lost before it had drained: its process died; try again"):
        await routers.restart_router(routers.addresses[0], 0.0)
    has_failed.set()
    await until(lambda: len(started) == 3 and routers.all_serve)
    assert routers.states and [router.state for router in routers.states] == ["serving", "serving"]
    assert started[0].calls == ["announce_drain"] and not started[2].calls


async def test_settings_that_change_while_a_router_starts(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No router serves with former settings: a process that started with them, and that no client uses yet, is ended,
    and the next one has the new ones."""
    routers = await supervise(grpc_port=0)
    may_serve = asyncio.Event()

    async def start(self: FakeRouterActor) -> str:
        await may_serve.wait()
        return f"host:{self.config.port}"

    monkeypatch.setattr(FakeRouterActor, "_start", start)
    restart = asyncio.create_task(routers.restart_router("host:5000", 0.0))
    await until(lambda: len(started) == 2)
    routers.set_config(ServeConfig.build({"model": "m", "grpc_port": 0, "max_queued": 5}))
    may_serve.set()
    await asyncio.wait_for(restart, MAX_WAIT_SECONDS)
    assert [router.config.max_queued for router in started] == [1024, 1024, 5] and started[1].is_dead
    assert routers.addresses == ["host:5000"] and routers.states and routers.states[0].reason == ""


async def test_a_restart_ends_when_the_node_of_the_router_leaves(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roll-out and `coatcheck restart` go on with the other routers, and do not wait for a process that will never
    start."""
    nodes = ["a" * 12, "b" * 12]
    monkeypatch.setattr(launch, "router_nodes", lambda resource: nodes)
    monkeypatch.setattr(router_set, "_ANNOUNCE_SECONDS", 0.0)
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=0)
    monkeypatch.setattr(FakeRouterActor, "_start", lambda self: asyncio.Event().wait())
    restart = asyncio.create_task(routers.restart_router("host:5000", 0.0))
    await until(lambda: len(started) == 3)
    nodes.pop(0)
    with pytest.raises(Unavailable, match="router-aaaaaaaa is gone with its node"):
        await asyncio.wait_for(restart, MAX_WAIT_SECONDS)


async def test_routers_are_restarted_one_at_a_time(
    supervise: Supervise, started: list[FakeRouterActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands that restart different routers at the same time do not drain both: one router serves all along."""
    monkeypatch.setattr(launch, "router_nodes", lambda resource: ["a" * 12, "b" * 12])
    monkeypatch.setattr(router_set, "_ANNOUNCE_SECONDS", 0.05)
    monkeypatch.setattr(router_set, "_RETURN_SECONDS", 0.05)
    monkeypatch.setattr(FakeRouterActor, "_start", lambda self: asyncio.sleep(0, f"host:{self.config.name}:1"))
    routers = await supervise(router_per_node=True, ray_address="h:1", grpc_port=1)
    await until(lambda: all(router.groups for router in started))
    restarts = [asyncio.create_task(routers.restart_router(address, 0.0)) for address in routers.addresses]
    fewest = 2
    while not all(restart.done() for restart in restarts):
        drained = {router.config.name for router in started if router.calls and not router.is_dead}
        serving = [state for state in routers.states or () if state.state == "serving"]
        fewest = min(fewest, len([state for state in serving if state.name not in drained]))
        await asyncio.sleep(0.005)
    await asyncio.gather(*restarts)
    assert fewest == 1 and len(started) == 4


def test_which_connection_is_missing() -> None:
    """A router is connected to a group that it reports as serving, draining or drained. A router that does not answer
    is left out."""
    lost = StatusResponse(groups=[GroupStatus(name="g", state="lost", reason="the stream broke")])
    drained = StatusResponse(groups=[GroupStatus(name="g", state="drained"), GroupStatus(name="h", running=1)])
    assert missing_connection({"r": None, "s": drained}, ["g"]) == ""
    assert missing_connection({"s": drained, "t": lost}, ["g"]) == "t does not use g: the stream broke"
    assert missing_connection({"t": lost}, ["x"]) == "t does not know x"
    assert busy_groups({"r": None, "s": drained, "t": lost}) == {"h"}
