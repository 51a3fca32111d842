"""Hundreds of requests at once: groups get what they have room for, `max_queued` wait, and the rest is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import Overloaded
from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.serving.generate_service import CallOptions
from tests.router.fake_group import FakeGroup
from tests.router.queueing_group import QueueingGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

SLOTS, WAITING = 8, 4  # the most requests that run in a group, and that wait in it


def send(
    router: RouterUnderTest, ids: list[int], tenant: Tenant = ANONYMOUS, priority: int = 0
) -> "asyncio.Task[GenerateResponse]":
    """Starts a request; returns its task."""
    sampling = SamplingParams(max_tokens=2, seed=1)
    message = GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling, priority=priority)
    return asyncio.create_task(router.server.generation.generate(message, CallOptions(tenant=tenant)))


@asynccontextmanager
async def reporting(*groups: QueueingGroup) -> AsyncIterator[None]:
    """Each group reports its load every 20 ms."""

    async def report() -> None:
        while True:
            for group in groups:
                group.report_load()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(report())
    yield
    task.cancel()


async def settled(
    router: RouterUnderTest, groups: list[QueueingGroup], asked: "list[asyncio.Task[GenerateResponse]]"
) -> None:
    """Waits until each request has been refused, waits in the queue, or is held by a group."""
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while sum(task.done() for task in asked) + len(router.server.dispatcher.queue) + sum(
            group.held for group in groups
        ) != len(asked):
            await router.admin.Status(StatusRequest())
    router.server.dispatcher.queue.check()


async def read_late_reports(router: RouterUnderTest, groups: list[QueueingGroup]) -> None:
    """Lets the router read reports from before the burst long after it."""
    for _ in range(3):
        for group in groups:
            link, mark = router.server.groups.find_connection(group.name), group.report_late()
            assert link is not None
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                while link.load.last_report.status.preemptions != mark:
                    await router.admin.Status(StatusRequest())
        await asyncio.sleep(0.05)


async def test_a_burst_fills_the_groups_then_the_queue_and_the_rest_is_refused(start_router: StartRouter) -> None:
    """Of 700 requests at once two groups get as many as they have room for, 256 wait, and all others are refused with a
    time to come again. Reports from before the burst change nothing, however late they come. All accepted requests are
    answered."""
    groups = [QueueingGroup(name, SLOTS) for name in ("g0", "g1")]
    router = await start_router(*groups, max_queued=256)
    room = len(groups) * (SLOTS + WAITING)
    asked = [send(router, [2 + number % 500, 5, 6]) for number in range(700)]
    await settled(router, groups, asked)
    await read_late_reports(router, groups)
    await settled(router, groups, asked)
    assert [group.most_held for group in groups] == [SLOTS + WAITING] * 2
    assert len(router.server.dispatcher.queue) == 256
    refusals = [task.exception() for task in asked if task.done()]
    assert len(refusals) == 700 - 256 - room
    assert all(isinstance(error, Overloaded) and error.retry_seconds >= 1 for error in refusals)
    async with reporting(*groups):
        for group in groups:
            group.go()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, GenerateResponse) for answer in answers) == 256 + room
    assert [group.most_held for group in groups] == [SLOTS + WAITING] * 2


async def test_a_burst_of_one_prompt_does_not_go_to_one_group(start_router: StartRouter) -> None:
    """If all requests have the same prompt, the group that caches it gets no more than it has room for."""
    groups = [QueueingGroup(name, SLOTS) for name in ("g0", "g1")]
    router = await start_router(*groups)
    asked = [send(router, list(range(2, 202))) for _ in range(100)]
    await settled(router, groups, asked)
    assert [group.most_held for group in groups] == [SLOTS + WAITING] * 2
    for group in groups:
        group.go()
    await asyncio.gather(*asked)
    assert [group.most_held for group in groups] == [SLOTS + WAITING] * 2


async def test_a_burst_of_one_tenant_does_not_delay_others(start_router: StartRouter) -> None:
    """Behind a burst of one tenant all of the few requests of two others are accepted. The urgent tenant's are sent
    first as slots become free, then the other tenant gets its half, although reports from before the burst come
    late."""
    group = QueueingGroup("g0", SLOTS)
    router = await start_router(group, max_queued=200)
    many, few, urgent = Tenant("many"), Tenant("few"), Tenant("urgent", priority=-1)
    asked = [send(router, [100, 5, 6], many) for _ in range(500)]
    asked += [send(router, [300, 5, 6], few) for _ in range(20)]
    asked += [send(router, [200, 5, 6], urgent) for _ in range(20)]
    await settled(router, [group], asked)
    await read_late_reports(router, [group])
    assert len(group.submits) == SLOTS + WAITING
    assert len(router.server.dispatcher.queue) == 200
    assert not any(task.done() for task in asked[500:]), "those of the one that has little waiting are kept"
    group.go()
    await asyncio.gather(*asked, return_exceptions=True)
    order = [submit.prompt_token_ids[0] for submit in group.submits[SLOTS + WAITING :]]
    assert order.count(200) == order.count(300) == 20
    assert order[:24].count(200) >= 18  # one of eight is taken whatever its priority
    assert 15 <= order[24:64].count(300) <= 20


async def test_a_burst_of_many_choices_counts_each(start_router: StartRouter) -> None:
    """A request for several choices takes that many slots, so a group does not get a multiple of its slots."""
    group = FakeGroup("g0", max_num_seqs=SLOTS, hold_after=0)
    router = await start_router(group)
    sampling = SamplingParams(max_tokens=2, seed=1, n=4)
    message = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]), sampling=sampling)
    asked = [asyncio.create_task(router.server.generation.generate(message)) for _ in range(20)]
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while len(router.server.dispatcher.queue) + len(group.submits) != 20:
            await router.admin.Status(StatusRequest())
    assert len(group.submits) == (SLOTS + WAITING) // 4
    group.go()
    await asyncio.gather(*asked)
