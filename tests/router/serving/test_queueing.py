"""The admission queue end to end: requests are sent in fair order once there is room, and never after their client has
disconnected."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import DeadlineExceeded, Overloaded, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.serving.admission_queue import due_at
from coatcheck.router.serving.generate_service import CallOptions
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

FULL = 1000


def ask(first: int, priority: int = 0) -> GenerateRequest:
    """A request that the group identifies by its first token, `first`."""
    return GenerateRequest(
        token_ids=TokenIds(ids=[first, 5, 6]), sampling=SamplingParams(max_tokens=2, seed=1), priority=priority
    )


def send(
    router: RouterUnderTest, message: GenerateRequest, tenant: Tenant = ANONYMOUS
) -> "asyncio.Task[GenerateResponse]":
    """Starts a request."""
    return asyncio.create_task(router.server.generation.generate(message, CallOptions(tenant=tenant)))


async def waiting(router: RouterUnderTest, count: int) -> None:
    """Waits until `count` requests are queued."""
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while len(router.server.dispatcher.queue) != count:
            await router.admin.Status(StatusRequest())
    router.server.dispatcher.queue.check()


def full_group(name: str = "g0", **settings: object) -> FakeGroup:
    """A group that reports a long queue."""
    group = FakeGroup(name, **settings)  # type: ignore[arg-type]  # by name
    group.load.status.waiting = FULL
    return group


async def open_full(
    start_router: StartRouter, group: FakeGroup, *others: FakeGroup, **settings: object
) -> RouterUnderTest:
    """A router that knows that `group` is full."""
    router = await start_router(group, *others, **settings)
    connection = router.server.groups.find_connection(group.name)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while connection is None or connection.load.has_room:
            await router.admin.Status(StatusRequest())
    return router


async def test_tenants_share_a_full_cluster_by_weight(start_router: StartRouter) -> None:
    """While the groups are full nothing is sent. Then a flood of one tenant gets only its share, and a tenant's urgent
    requests go first."""
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


async def test_a_group_gets_no_more_than_it_can_start(start_router: StartRouter) -> None:
    """Without reports the router counts what it has sent, and keeps the other requests until some have ended."""
    group = FakeGroup(max_num_seqs=4, hold_after=0)
    router = await start_router(group)
    asked = [send(router, ask(100)) for _ in range(20)]
    await waiting(router, 12)  # four run and four wait there
    await group.until(lambda: len(group.submits) == 8)
    group.go()
    await asyncio.gather(*asked)
    assert len(group.submits) == 20


async def test_status_and_metrics_have_the_current_queue_time(start_router: StartRouter) -> None:
    """While a request waits, status and metrics have its waiting time; soon after the queue is empty it is zero."""
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
    queue = router.server.dispatcher.queue
    assert queue.queue_seconds(asyncio.get_running_loop().time() + 2.0) == 0


async def test_short_prompts_do_not_wait_for_long_ones(start_router: StartRouter) -> None:
    """Of one tenant's queued requests, a much shorter one that came a little later goes first. One that came long after
    does not, so no long prompt is overtaken for ever."""
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
    assert router.server.dispatcher.queue.queue_seconds(came + 60.0) > 60.0, (
        "the time of the long prompt, though it is not next"
    )
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [7, 100]
    assert due_at(now, 0.2) < due_at(now + 4.1, 0.0)


async def test_a_full_queue_refuses_at_once(start_router: StartRouter) -> None:
    """Past the limit a client gets RESOURCE_EXHAUSTED and a retry delay; queued requests are served."""
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


async def test_a_queued_request_ends_at_its_deadline_or_cancel(start_router: StartRouter) -> None:
    """A request that its client has given up is never sent to a group."""
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


async def test_queued_requests_survive_the_loss_of_a_group(start_router: StartRouter) -> None:
    """A group that is killed takes no queued request with it: the next group serves them."""
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


async def test_no_request_waits_for_ever_for_groups(start_router: StartRouter) -> None:
    """Once no group serves, new requests are refused at once although others are queued. The queued ones wait for a
    group as long as moved streams do."""
    group = full_group()
    router = await open_full(start_router, group, move_wait_seconds=0.5)
    asked = [send(router, ask(100)) for _ in range(3)]
    await waiting(router, 3)
    await group.kill()
    await router.wait_for_groups(0)
    with pytest.raises(Unavailable, match="no worker group is serving"):
        await asyncio.wait_for(send(router, ask(200)), MAX_WAIT_SECONDS)
    assert len(router.server.dispatcher.queue) == 3
    for one in asked:
        with pytest.raises(Unavailable, match="no worker group is serving"):
            await asyncio.wait_for(one, MAX_WAIT_SECONDS)
    await group.start()
    await router.wait_for_groups(1)
    group.report(waiting=0)
    assert len((await send(router, ask(300))).choices[0].token_ids) == 2


async def test_a_request_that_a_full_group_refuses_is_queued(start_router: StartRouter) -> None:
    """A group that refuses with RESOURCE_EXHAUSTED gets nothing until its next report, and the client does not
    notice."""
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


async def test_a_tenant_over_its_rate_limit_gets_a_retry_delay(start_router: StartRouter) -> None:
    """A tenant over its requests per minute is refused before any work is done; others are not."""
    router = await start_router(FakeGroup())
    limited = Tenant("limited", requests_per_minute=2)
    for _ in range(2):
        await send(router, ask(1), limited)
    with pytest.raises(Overloaded) as refused:
        await send(router, ask(1), limited)
    assert 25 < refused.value.retry_seconds <= 30
    await send(router, ask(1))


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(start_router: StartRouter) -> None:
    """If even the first token would come too late, the request is refused and not sent. Otherwise the group gets the
    time that is left."""
    group = FakeGroup()
    group.load.queued_prefill_tokens = 20_480  # ten steps of a second, and yet room for more
    group.load.status.step_seconds, group.load.status.prefill_tokens_per_second = 1.0, 1e6
    router = await start_router(group)
    connection = router.server.groups.find_connection("g0")
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while connection is None or not connection.load.last_report.status.step_seconds:
            await router.admin.Status(StatusRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(ask(1), timeout=6)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the first token would take at least 10.0 s" in (refused.value.details() or "")
    assert not group.submits
    await router.generation.Generate(ask(2), timeout=6000)
    await router.generation.Generate(ask(3))
    (timed, patient) = group.submits
    assert 5000 < timed.seconds_left < 6020 and not patient.HasField("seconds_left")


async def test_a_request_that_cannot_be_next_in_time_is_refused(start_router: StartRouter) -> None:
    """The estimate is the number of requests that are certainly ahead, times the mean time between grants. There is
    none before eight grants."""
    group = full_group(max_num_seqs=4, hold_after=0)
    router = await open_full(start_router, group)
    queue, now = router.server.dispatcher.queue, asyncio.get_running_loop().time
    anywhere = router.server.dispatcher.serving.eligible()
    asked = [send(router, ask(100)) for _ in range(12)]
    await waiting(router, 12)
    queue.require_room(ANONYMOUS, 0, now() + 80, now() + 80, anywhere)  # no grants yet
    group.report(waiting=0)
    await waiting(router, 4)  # eight were sent
    later = now() + 80  # ten seconds for each grant
    with pytest.raises(DeadlineExceeded, match="4 requests wait before this one, for about 4[0-9].* s"):
        queue.require_room(ANONYMOUS, 0, later, later + 15, anywhere)
    queue.require_room(ANONYMOUS, 0, later, later + 30, anywhere)
    queue.require_room(ANONYMOUS, 0, later, None, anywhere)
    queue.require_room(ANONYMOUS, -1, later, later + 1, anywhere)  # more urgent than all that wait
    queue.require_room(Tenant("other"), 0, later, later + 1, anywhere)
    group.go()
    await asyncio.gather(*asked)


async def test_a_queued_request_ends_when_its_deadline_passes(start_router: StartRouter) -> None:
    """At once, while no group has room or reports anything; the requests behind it keep their places."""
    group = full_group()
    router = await open_full(start_router, group)
    deadline = asyncio.get_running_loop().time() + 1.0
    late = asyncio.create_task(router.server.generation.generate(ask(1), CallOptions(deadline=deadline)))
    kept = send(router, ask(2))
    await waiting(router, 2)
    with pytest.raises(DeadlineExceeded, match="the deadline passed after"):
        await asyncio.wait_for(late, MAX_WAIT_SECONDS)
    assert len(router.server.dispatcher.queue) == 1
    group.report(waiting=0)
    await kept
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [2]


async def test_a_refused_request_without_output_goes_to_any_group(start_router: StartRouter) -> None:
    """A request that a full group has refused has no token yet, so a group that is not equal to that one may answer
    it."""
    full, other = FakeGroup("a", refuse=(8, "full")), full_group("b")
    other.model.kv_dtype = "int8"
    router = await open_full(start_router, other, full)
    await router.wait_for_groups(2)
    asked = send(router, ask(1))
    await waiting(router, 1)
    await full.until(lambda: len(full.submits) == 1)
    other.report(waiting=0)
    answer = await asyncio.wait_for(asked, MAX_WAIT_SECONDS)
    assert (answer.final.group, len(other.submits)) == ("b", 1)


def ask_long(first: int, tokens: int = 100) -> GenerateRequest:
    """A request that a group of 32 tokens cannot hold."""
    return GenerateRequest(token_ids=TokenIds(ids=[first] * tokens), sampling=SamplingParams(max_tokens=2, seed=1))


async def test_a_prompt_without_room_delays_no_other(start_router: StartRouter) -> None:
    """While the only group that can hold a long prompt is full, short prompts of any tenant go to another group at
    once. The long one keeps its place: it is sent first once its group has room."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large")
    for group in (small, large):
        group.load.status.prefill_tokens_per_second = 1e9  # so that a long prompt is not due much later
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
    connection = router.server.groups.find_connection("small")
    async with asyncio.timeout(10):
        while connection is None or connection.load.has_room:
            await router.admin.Status(StatusRequest())
    asked = [send(router, ask(number), one) for number in (9, 10)]
    await waiting(router, 3)
    large.report(waiting=0)
    await asyncio.gather(long, *asked)
    assert large.submits[0].prompt_token_ids[0] == 100
    assert len(router.server.dispatcher.queue) == 0


async def test_a_waiting_request_goes_to_a_new_group_that_can_hold_it(start_router: StartRouter) -> None:
    """A short and a long prompt wait for the only group. When a small group joins, the short one goes there, though the
    long one came first."""
    large, small = full_group("large"), FakeGroup("small", num_blocks=8)
    large.load.status.prefill_tokens_per_second = 1e9  # so that the long prompt is not due much later
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


async def test_requests_for_other_groups_are_not_ahead(start_router: StartRouter) -> None:
    """Long prompts that wait for the only group that can hold them do not count as ahead of a short one."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large", max_num_seqs=4, hold_after=0)
    router = await open_full(start_router, large)
    asked = [send(router, ask_long(100)) for _ in range(20)]
    await waiting(router, 20)
    large.report(waiting=0)
    await waiting(router, 12)  # eight grants
    queue, now = router.server.dispatcher.queue, asyncio.get_running_loop().time() + 100
    with pytest.raises(DeadlineExceeded, match="12 requests wait before this one"):
        queue.require_room(ANONYMOUS, 0, now, now + 1, router.server.dispatcher.serving.eligible())
    router.groups.append(small)
    await router.server.set_groups([router.server.groups.find_connection("large").endpoint, await small.start()])  # type: ignore[union-attr]
    await router.wait_for_groups(2)
    queue.require_room(ANONYMOUS, 0, now, now + 1, router.server.dispatcher.serving.eligible())
    large.go()
    await asyncio.gather(*asked)
