"""The admission queue end to end: requests are sent in fair order, once there is room, and never after their client has
gone."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import DeadlineExceeded, Overloaded
from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.serving.admission_queue import due_at
from coatcheck.router.serving.generate_service import CallOptions
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

FULL = 1000


def ask(first: int, priority: int = 0) -> GenerateRequest:
    """A request that is known by its first token."""
    return GenerateRequest(
        token_ids=TokenIds(ids=[first, 5, 6]), sampling=SamplingParams(max_tokens=2, seed=1), priority=priority
    )


def send(
    router: RouterUnderTest, message: GenerateRequest, tenant: Tenant = ANONYMOUS
) -> "asyncio.Task[GenerateResponse]":
    """On its way."""
    return asyncio.create_task(router.server.generation.generate(message, CallOptions(tenant=tenant)))


async def waiting(router: RouterUnderTest, count: int) -> None:
    """Waits until `count` requests are queued."""
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while len(router.server.dispatcher.queue) != count:
            await router.admin.Status(StatusRequest())
    router.server.dispatcher.queue.check()


def full_group(name: str = "g0", **settings: object) -> FakeGroup:
    """One whose own queue is long."""
    group = FakeGroup(name, **settings)  # type: ignore[arg-type]  # by name
    group.load.status.waiting = FULL
    return group


async def open_full(start_router: StartRouter, group: FakeGroup, **settings: object) -> RouterUnderTest:
    """A router that has heard that its group is full."""
    router = await start_router(group, **settings)
    link = router.server.groups.find_connection(group.name)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while link is None or link.load.has_room:
            await router.admin.Status(StatusRequest())
    return router


async def test_tenants_share_a_full_cluster_by_weight(start_router: StartRouter) -> None:
    """While the groups are full nothing is sent; then a flood of one tenant's gets its share and no more, and the
    urgent of a tenant go first."""
    group = full_group()
    router = await open_full(start_router, group)
    flood, heavy = Tenant("flood", weight=1), Tenant("heavy", weight=3)
    asked = [send(router, ask(100), flood) for _ in range(60)]
    await waiting(router, 60)
    asked += [send(router, ask(200, priority=1 if n < 12 else 0), heavy) for n in range(24)]
    await waiting(router, 84)
    assert not group.submits
    group.report(waiting=0)
    answers = await asyncio.gather(*asked)
    assert len(answers) == len(group.submits) == 84
    first = [submit.prompt_token_ids[0] for submit in group.submits[:16]]
    assert 10 <= first.count(200) <= 13  # 12 by weight
    urgent = [submit.priority == 0 for submit in group.submits if submit.prompt_token_ids[0] == 200]
    assert sum(urgent[:9]) >= 7  # one of eight goes whatever its priority
    router.server.dispatcher.queue.check()


async def test_a_group_is_not_given_more_than_it_can_begin(start_router: StartRouter) -> None:
    """Without a word from the group the router counts what it has sent, and keeps the rest until something ends."""
    group = FakeGroup(max_num_seqs=4, hold_after=0)
    router = await start_router(group)
    asked = [send(router, ask(100)) for _ in range(20)]
    await waiting(router, 12)  # four run, four are ready there
    await group.until(lambda: len(group.submits) == 8)
    group.go()
    await asyncio.gather(*asked)
    assert len(group.submits) == 20


async def test_how_long_the_line_is_now_is_told(start_router: StartRouter) -> None:
    """While somebody waits the status and the metrics say for how long; soon after the queue is empty, zero."""
    group = full_group()
    router = await open_full(start_router, group)
    assert (await router.admin.Status(StatusRequest())).queue_seconds == 0
    asked = send(router, ask(100))
    await waiting(router, 1)
    first = (await router.admin.Status(StatusRequest())).queue_seconds
    second = (await router.admin.Status(StatusRequest())).queue_seconds
    assert 0 < first < second
    page = router.server.metrics.render().decode().splitlines()
    (line,) = [line for line in page if line.startswith("coatcheck_queue_now_seconds ")]
    assert float(line.split()[1]) > second
    group.report(waiting=0)
    await asked
    line_now = router.server.dispatcher.queue
    assert line_now.queue_seconds(asyncio.get_running_loop().time() + 2.0) == 0


async def test_short_prompts_do_not_wait_for_long_ones(start_router: StartRouter) -> None:
    """Of one tenant's queued requests, one that came a little later with much less to compute goes first; one that came
    long after does not: a long prompt is not overtaken for ever."""
    group = full_group(max_num_seqs=4)
    group.load.status.prefill_tokens_per_second = 1000.0
    router = await open_full(start_router, group)
    now = asyncio.get_running_loop().time()
    long = GenerateRequest(token_ids=TokenIds(ids=[100] * 200), sampling=SamplingParams(max_tokens=2, seed=1))
    asked = [send(router, long)]
    await waiting(router, 1)
    came = asyncio.get_running_loop().time()
    asked.append(send(router, ask(7)))
    await waiting(router, 2)
    assert router.server.dispatcher.queue.queue_seconds(came + 60.0) > 60.0, "of the long one, though it is not next"
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [7, 100]
    assert due_at(now, 0.2) < due_at(now + 4.1, 0.0)


async def test_a_full_line_refuses_at_once(start_router: StartRouter) -> None:
    """Past the bound a client hears RESOURCE_EXHAUSTED and when to come again; queued requests are served."""
    group = full_group()
    router = await open_full(start_router, group, max_queued=2)
    asked = [send(router, ask(100)) for _ in range(2)]
    await waiting(router, 2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(ask(101))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"RetryInfo" in dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]  # type: ignore[arg-type, index]
    displaced = asked.pop()
    asked.append(send(router, ask(102), Tenant("other")))
    with pytest.raises(Overloaded):
        await displaced
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [100, 102]


async def test_a_deadline_or_a_cancel_in_line_ends_it_there(start_router: StartRouter) -> None:
    """What nobody waits for any more is never sent to a group."""
    group = full_group()
    router = await open_full(start_router, group)
    late = asyncio.ensure_future(router.generation.Generate(ask(1), timeout=0.2))
    gone = router.generation.Generate(ask(2))
    gone_task = asyncio.ensure_future(gone)
    kept = send(router, ask(3))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await late
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await waiting(router, 2)
    gone.cancel()
    await waiting(router, 1)
    group.report(waiting=0)
    await kept
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [3]
    assert gone_task.cancelled() or gone_task.done()
    assert router.server.traffic.active == 0


async def test_those_in_line_outlive_a_group(start_router: StartRouter) -> None:
    """A group that is killed takes no queued request with it: the next group that comes serves them."""
    group = full_group()
    router = await open_full(start_router, group)
    asked = [send(router, ask(100)) for _ in range(5)]
    await waiting(router, 5)
    await group.kill()
    await router.wait_for_groups(0)
    assert len(router.server.dispatcher.queue) == 5
    group.load.status.waiting = 0
    await group.start()
    answers = await asyncio.gather(*asked)
    assert [len(answer.choices[0].token_ids) for answer in answers] == [2] * 5


async def test_what_a_full_group_refuses_waits_with_the_router(start_router: StartRouter) -> None:
    """A group that says RESOURCE_EXHAUSTED is given nothing until its next report, and its client does not notice."""
    group = FakeGroup(refuse=(8, "full"))
    router = await start_router(group)
    asked = [send(router, ask(100)) for _ in range(3)]
    await waiting(router, 3)
    refused = len(group.submits)
    group.refuse = None
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert len(group.submits) == refused + 3
    assert len(router.server.dispatcher.queue) == 0


async def test_a_limited_tenant_is_told_when_to_come(start_router: StartRouter) -> None:
    """A tenant past its requests a minute is refused before anything is done for it; others are not."""
    router = await start_router(FakeGroup())
    limited = Tenant("limited", requests_per_minute=2)
    for _ in range(2):
        await send(router, ask(1), limited)
    with pytest.raises(Overloaded) as refused:
        await send(router, ask(1), limited)
    assert 25 < refused.value.retry_seconds <= 30
    await send(router, ask(1))


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(start_router: StartRouter) -> None:
    """Where even a first token would come too late the client hears so, and no group hears of it; with time enough the
    group is told how much there is."""
    group = FakeGroup()
    group.load.queued_prefill_tokens = 20_480  # ten steps of a second, and yet room for more
    group.load.status.step_seconds, group.load.status.prefill_tokens_per_second = 1.0, 1e6
    router = await start_router(group)
    link = router.server.groups.find_connection("g0")
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while link is None or not link.load.last.status.step_seconds:
            await router.admin.Status(StatusRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(ask(1), timeout=6)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the first token would take 10.0 s at the least" in (refused.value.details() or "")
    assert not group.submits
    await router.generation.Generate(ask(2), timeout=6000)
    await router.generation.Generate(ask(3))
    (timed, patient) = group.submits
    assert 5000 < timed.seconds_left < 6020 and not patient.HasField("seconds_left")


async def test_a_turn_that_cannot_come_in_time_is_not_waited_for(start_router: StartRouter) -> None:
    """Judged by how fast the queue moves, by the requests that are certainly ahead, and once it has moved a while."""
    group = full_group(max_num_seqs=4, hold_after=0)
    router = await open_full(start_router, group)
    line, now = router.server.dispatcher.queue, asyncio.get_running_loop().time
    anywhere = EligibleGroups.of(router.server.groups.serving())
    asked = [send(router, ask(100)) for _ in range(12)]
    await waiting(router, 12)
    line.require_room(ANONYMOUS, 0, now() + 80, now() + 80, anywhere)  # it has not moved yet
    group.report(waiting=0)
    await waiting(router, 4)  # eight are with the group
    later = now() + 80  # ten seconds for each that has gone
    with pytest.raises(DeadlineExceeded, match="4 requests wait before it, which takes about 4[0-9].* s"):
        line.require_room(ANONYMOUS, 0, later, later + 15, anywhere)
    line.require_room(ANONYMOUS, 0, later, later + 30, anywhere)
    line.require_room(ANONYMOUS, 0, later, None, anywhere)
    line.require_room(ANONYMOUS, -1, later, later + 1, anywhere)  # more urgent than all that wait
    line.require_room(Tenant("other"), 0, later, later + 1, anywhere)
    group.go()
    await asyncio.gather(*asked)


async def test_who_is_late_in_line_is_not_sent(start_router: StartRouter) -> None:
    """A request whose deadline passed while it waited is refused when there is room; another request gets the room."""
    group = full_group()
    router = await open_full(start_router, group)
    deadline = asyncio.get_running_loop().time() + 1.0
    late = asyncio.create_task(router.server.generation.generate(ask(1), CallOptions(deadline=deadline)))
    kept = send(router, ask(2))
    await waiting(router, 2)
    await asyncio.sleep(deadline - asyncio.get_running_loop().time())
    group.report(waiting=0)
    with pytest.raises(DeadlineExceeded, match="its deadline passed after"):
        await late
    await kept
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [2]


def ask_long(first: int, tokens: int = 100) -> GenerateRequest:
    """One that a group of 32 tokens cannot hold."""
    return GenerateRequest(token_ids=TokenIds(ids=[first] * tokens), sampling=SamplingParams(max_tokens=2, seed=1))


async def test_a_prompt_that_no_group_has_room_for_holds_up_nobody_else(start_router: StartRouter) -> None:
    """While the only group that could hold a long prompt is full, short ones of its own tenant and of others go to
    another group at once. The long one keeps its place: it is the first to be sent once its group has room."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large")
    for group in (small, large):
        group.load.status.prefill_tokens_per_second = 1e9  # so that nobody is due much later for its length
    router = await open_full(start_router, large)
    router.groups.append(small)
    await router.server.set_groups([router.server.groups.find_connection("large").endpoint, await small.start()])  # type: ignore[union-attr]
    await router.wait_for_groups(2)
    one, other = Tenant("one"), Tenant("other")
    long = send(router, ask_long(100), one)
    await waiting(router, 1)
    async with asyncio.timeout(10):
        await send(router, ask(7), other)
        await send(router, ask(8), one)
    assert [submit.prompt_token_ids[0] for submit in small.submits] == [7, 8] and not long.done()
    small.report(waiting=FULL)
    link = router.server.groups.find_connection("small")
    async with asyncio.timeout(10):
        while link is None or link.load.has_room:
            await router.admin.Status(StatusRequest())
    asked = [send(router, ask(number), one) for number in (9, 10)]
    await waiting(router, 3)
    large.report(waiting=0)
    await asyncio.gather(long, *asked)
    assert large.submits[0].prompt_token_ids[0] == 100
    assert len(router.server.dispatcher.queue) == 0


async def test_a_waiting_request_goes_to_a_new_group_that_can_hold_it(start_router: StartRouter) -> None:
    """A short and a long prompt wait for the only group there is: when a small one joins, the short one goes there,
    though the long one came first and must go on waiting."""
    large, small = full_group("large"), FakeGroup("small", num_blocks=8)
    large.load.status.prefill_tokens_per_second = 1e9  # so that the long one is not due much later for its length
    router = await open_full(start_router, large)
    long = send(router, ask_long(100))
    await waiting(router, 1)
    short = send(router, ask(7))
    await waiting(router, 2)
    router.groups.append(small)
    await router.server.set_groups([router.server.groups.find_connection("large").endpoint, await small.start()])  # type: ignore[union-attr]
    async with asyncio.timeout(10):
        await short
    assert len(small.submits) == 1 and not long.done()
    large.report(waiting=0)
    await long


async def test_a_deadline_is_not_judged_by_those_that_wait_for_other_groups(start_router: StartRouter) -> None:
    """Long prompts that wait for the only group that can hold them are not ahead of a short one in any case."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large", max_num_seqs=4, hold_after=0)
    router = await open_full(start_router, large)
    asked = [send(router, ask_long(100)) for _ in range(20)]
    await waiting(router, 20)
    large.report(waiting=0)
    await waiting(router, 12)  # it has moved
    line, now = router.server.dispatcher.queue, asyncio.get_running_loop().time() + 100
    with pytest.raises(DeadlineExceeded, match="12 requests wait before it"):
        line.require_room(ANONYMOUS, 0, now, now + 1, EligibleGroups.of(router.server.groups.serving()))
    router.groups.append(small)
    await router.server.set_groups([router.server.groups.find_connection("large").endpoint, await small.start()])  # type: ignore[union-attr]
    await router.wait_for_groups(2)
    line.require_room(ANONYMOUS, 0, now, now + 1, EligibleGroups.of(router.server.groups.serving()))
    large.go()
    await asyncio.gather(*asked)
