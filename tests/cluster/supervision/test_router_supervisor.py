"""A router that hangs is told from one that is busy, or that a suspended supervisor has not heard. A restart whose new
process does not serve fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from ray.exceptions import RayActorError, RayTaskError

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.supervision import router_supervisor
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.router_supervisor import RouterSupervisor
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.router.actor import RouterReport
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.heartbeat import Heartbeat
from coatcheck.router.groups.group_list import NO_LIST
from tests.cluster.supervision.fake_router_actor import FakeRouterActor


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "its process has not answered for 1 s"),
        (RouterReport(Heartbeat(60.0, 0.0), NO_LIST), "its event loop has been blocked for 60 s"),
    ],
    ids=["suspended", "blocked"],
)
async def test_a_router_that_hangs_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch, report: RouterReport | None, reason: str
) -> None:
    """A restarted supervisor finds a router whose process or event loop hangs. It ends this router and starts
    another."""
    config = RouterConfig("m")
    hung, other = FakeRouterActor(config), FakeRouterActor(config)
    never = asyncio.Event()

    async def answer_report() -> RouterReport | None:
        if report is None:
            await never.wait()
        return report

    monkeypatch.setattr(hung, "_start", never.wait)
    monkeypatch.setattr(hung, "_report", answer_report)
    monkeypatch.setattr(launch, "find_router", lambda name: None if hung.is_dead else hung)
    monkeypatch.setattr(launch, "start_router", lambda config, resource, node: other)
    monkeypatch.setattr(launch, "kill_actor", lambda actor: setattr(actor, "is_dead", True))
    store_numbers(monkeypatch)
    monkeypatch.setattr(router_supervisor, "HANG_SECONDS", 1.0)
    router = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.01), has_served=True)
    supervision = asyncio.create_task(router.supervise_router())
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not router.address:  # noqa: ASYNC110  # the address has no event
            await asyncio.sleep(0.01)
    supervision.cancel()
    assert hung.is_dead and router.state.last_failure == reason


@pytest.fixture
async def restarted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RouterSupervisor]:
    """The supervisor of a router that serves."""
    monkeypatch.setattr(launch, "find_router", lambda name: None)
    monkeypatch.setattr(launch, "start_router", lambda config, resource, node: FakeRouterActor(config))
    monkeypatch.setattr(launch, "kill_actor", lambda actor: setattr(actor, "is_dead", True))
    store_numbers(monkeypatch)
    monkeypatch.setattr(router_supervisor, "_RESTART_SECONDS", 0.01)
    router = RouterSupervisor(RouterConfig("m"), VersionedGroupList(), PollInterval(0.01), has_served=True)
    supervision = asyncio.create_task(router.supervise_router())
    await until_serving(router)
    yield router
    supervision.cancel()


def store_numbers(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stand in for the numbers in Ray's key-value store; they are returned."""
    numbers: dict[str, int] = {}
    monkeypatch.setattr(ray_kv, "read_number", numbers.get)
    monkeypatch.setattr(ray_kv, "write_number", numbers.__setitem__)
    monkeypatch.setattr(ray_kv, "delete_value", lambda key: numbers.pop(key, None))
    return numbers


async def until_serving(router: RouterSupervisor) -> None:
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not router.address:  # noqa: ASYNC110  # the address has no event
            await asyncio.sleep(0.01)


class _CreationFailed(RayActorError):
    """What Ray raises if the constructor of an actor, or the import of its class, fails."""

    def __init__(self) -> None:
        super().__init__(
            error_msg="The actor died because of an error raised in its creation task, ray::RouterActor\n"
            "  File router/actor.py, line 1\nImportError: no module named grpc\n",
            actor_init_failed=True,
        )


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("_log_file", _CreationFailed(), "ImportError: no module named grpc"),
        ("_start", RayActorError(), "its process died (log: {log}; its last lines: loading | Fatal Python error)"),
        ("_start", ImportError("no module named grpc"), "ImportError: no module named grpc (log: {log})"),
        ("_start", InvalidConfig("tls-cert is no file"), "tls-cert is no file"),
    ],
    ids=["class", "crash", "import", "refusal"],
)
async def test_a_restart_of_a_router_that_cannot_start_fails(
    restarted: RouterSupervisor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    error: Exception,
    reason: str,
) -> None:
    """After three failed starts in a row `restart_router` raises the reason: the error, or the last lines of the log. A
    name that Ray has not freed yet is no failed start. The supervisor goes on, and the router serves once it can."""
    log = tmp_path / "worker.err"
    log.write_text("loading\nFatal Python error\n")
    failures = [error] * 3
    if not isinstance(error, RayActorError):
        failures = [RayTaskError("start", "", error)] * 3
    starts: list[str] = []
    names_in_use = 5

    def start_router(config: RouterConfig, resource: str | None, node: str | None) -> FakeRouterActor:
        nonlocal names_in_use
        starts.append("name in use" if names_in_use else "started")
        if names_in_use:
            names_in_use -= 1
            raise ValueError("the name router-0 is taken")
        actor = FakeRouterActor(config)

        async def fail() -> str:
            if failures:
                raise failures.pop()
            answer: str = await getattr(FakeRouterActor, method)(actor)
            return answer

        monkeypatch.setattr(actor, "_log_file", AsyncMock(return_value=str(log)))
        monkeypatch.setattr(actor, method, fail)
        return actor

    monkeypatch.setattr(launch, "start_router", start_router)
    with pytest.raises(Unavailable) as failed:
        await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)
    why = reason.format(log=log)
    assert str(failed.value) == (
        f"router-0 does not start again: {why}; 3 starts in a row failed, and the supervisor tries again and again"
    )
    assert starts == ["name in use"] * 5 + ["started"] * 3 and restarted.state.reason == why
    await until_serving(restarted)
    assert restarted.state.state == "serving" and restarted.state.last_failure == why


async def test_a_router_of_an_older_version_starts(
    restarted: RouterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts the router that is installed, which may not know every method of its own."""
    missing = AsyncMock(side_effect=RayTaskError("log_file", "", AttributeError("log_file")))
    monkeypatch.setattr(FakeRouterActor, "_log_file", missing)
    await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)
    assert missing.await_count == 1


@pytest.mark.parametrize("runs", [False, True])
async def test_a_restart_does_not_wait_for_ever(
    restarted: RouterSupervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool
) -> None:
    """After ten minutes `restart_router` fails, and says whether there is a process. The supervisor waits on."""
    monkeypatch.setattr(router_supervisor, "_START_SECONDS", 1.0)
    may_start = asyncio.Event()

    async def wait_for_start(self: FakeRouterActor) -> str:
        await may_start.wait()
        return "host:5000" if runs else ""

    monkeypatch.setattr(FakeRouterActor, "_start" if runs else "_log_file", wait_for_start)
    if runs:
        monkeypatch.setattr(FakeRouterActor, "_log_file", AsyncMock(return_value="/logs/worker.err"))
    said = "its process runs, but does not serve within 1 s .log: /logs/worker.err." if runs else "`ray status` shows"
    with pytest.raises(Unavailable, match=f"router-0 does not start again: .*{said}"):
        await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)
    may_start.set()
    await until_serving(restarted)


async def test_a_restart_fails_with_the_reason_that_there_is_no_process(
    restarted: RouterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Ray never frees the name of the former process, no start fails, but the name is the reason."""
    monkeypatch.setattr(router_supervisor, "_START_SECONDS", 1.0)
    taken = Mock(side_effect=ValueError("the name router-0 is taken"))
    monkeypatch.setattr(launch, "start_router", taken)
    with pytest.raises(Unavailable, match="no process of it has answered within 1 s; .*the name router-0 is taken"):
        await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)


async def test_a_restart_does_not_end_the_new_process(
    restarted: RouterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old process ends at once, but Ray tells it late, when the new process already serves."""
    started: list[FakeRouterActor] = []

    def start_router(config: RouterConfig, resource: str | None, node: str | None) -> FakeRouterActor:
        started.append(FakeRouterActor(config))
        return started[-1]

    async def stop(actor: FakeRouterActor) -> None:
        actor.is_dead = True
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not (started and restarted.address and restarted.state.restarts):  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)

    monkeypatch.setattr(launch, "start_router", start_router)
    monkeypatch.setattr(FakeRouterActor, "_stop", stop)
    await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)
    assert len(started) == 1 and not started[0].is_dead


async def test_a_router_that_refuses_to_drain_serves_on(
    restarted: RouterSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart fails with the error of the drain. The router, which was not replaced, is not shown as draining."""
    refused = AsyncMock(side_effect=RayTaskError("drain", "", RuntimeError("no drain")))
    monkeypatch.setattr(FakeRouterActor, "_drain", refused)
    with pytest.raises(Unavailable, match="router-0 did not drain: RuntimeError: no drain; try again"):
        await asyncio.wait_for(restarted.restart_router(0.0, 0.0), MAX_WAIT_SECONDS)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while restarted.state.state != "serving":  # noqa: ASYNC110  # the state has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("version", ["this", "older"])
async def test_a_router_whose_restart_has_lost_its_supervisor_serves_again(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """A supervisor dies between a router's drain and its stop. The next supervisor undoes the drain. A router of an
    older version, which cannot do this, is started again."""
    config, never = RouterConfig("m"), asyncio.Event()
    actors = [FakeRouterActor(config), FakeRouterActor(config)]
    drained = actors[0]
    numbers = store_numbers(monkeypatch)
    starts: list[str] = []
    stop = FakeRouterActor._stop

    def start_router(config: RouterConfig, resource: str | None, node: str | None) -> FakeRouterActor:
        starts.append("start")
        return actors[len(starts) - 1]

    monkeypatch.setattr(launch, "find_router", lambda name: drained if starts and not drained.is_dead else None)
    monkeypatch.setattr(launch, "start_router", start_router)
    monkeypatch.setattr(launch, "kill_actor", lambda actor: setattr(actor, "is_dead", True))
    monkeypatch.setattr(drained, "_stop", never.wait)  # the first supervisor gets no further
    monkeypatch.setattr(router_supervisor, "_RESTART_SECONDS", 0.01)
    former = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.01), has_served=True)
    tasks = [asyncio.create_task(former.supervise_router())]
    await until_serving(former)
    tasks.append(asyncio.create_task(former.restart_router(0.0, 0.01)))
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not drained.is_draining:  # noqa: ASYNC110  # the drain has no event
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    drained.is_dead = False
    monkeypatch.setattr(drained, "_stop", stop)
    if version == "older":
        monkeypatch.delattr(FakeRouterActor, "_undo_drain")

    following = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.01), has_served=True)
    supervision = asyncio.create_task(following.supervise_router())
    await until_serving(following)
    supervision.cancel()
    if version == "this":
        assert drained.calls == ["announce_drain", "drain", "undo_drain"] and starts == ["start"]
        assert not drained.is_draining
    else:
        assert starts == ["start", "start"] and drained.is_dead
    assert ray_kv.restart_key(config.name) not in numbers


async def test_a_drain_by_an_operator_stays_under_the_next_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor adopts a router that `coatcheck drain` has drained. It stays drained."""
    config = RouterConfig("m")
    drained = FakeRouterActor(config)
    drained.is_draining = True
    store_numbers(monkeypatch)
    monkeypatch.setattr(launch, "find_router", lambda name: drained)
    monkeypatch.setattr(launch, "kill_actor", lambda actor: None)
    router = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.01), has_served=True)
    supervision = asyncio.create_task(router.supervise_router())
    await until_serving(router)
    supervision.cancel()
    assert drained.is_draining and not drained.calls


async def test_a_supervisor_that_was_suspended_itself_reads_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that answers while the supervisor does not run is not restarted; one that never answers hangs."""
    monkeypatch.setattr(router_supervisor, "HANG_SECONDS", 1.0)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(router_supervisor._answer_in_time(answer))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(answer.set_result, "serving")
    time.sleep(1.5)  # noqa: ASYNC251 as a suspended process, which runs nothing until the time is over
    assert await waiting == "serving"
    silent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError, match="has not answered for 1 s"):
        await router_supervisor._answer_in_time(silent)
    assert silent.cancelled()
