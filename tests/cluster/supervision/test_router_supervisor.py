"""A router that hangs is told from one that is busy, or that a suspended supervisor has not heard."""

import asyncio
import time

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.supervision import router_supervisor
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.router_supervisor import RouterSupervisor
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList
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
    monkeypatch.setattr(ray_kv, "write_number", lambda key, number: None)
    monkeypatch.setattr(router_supervisor, "HANG_SECONDS", 1.0)
    router = RouterSupervisor(config, VersionedGroupList(), PollInterval(0.01), has_served=True)
    supervision = asyncio.create_task(router.supervise_router())
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not router.address:  # noqa: ASYNC110  # the address has no event
            await asyncio.sleep(0.01)
    supervision.cancel()
    assert hung.is_dead and router.state.last_failure == reason


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
