"""The line end to end: who waits is sent in fair order, once there is room, and never after its client has gone."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.patience import PATIENCE_SECONDS
from coatcheck.proto.errors import DeadlineExceeded, Overloaded
from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.router.access.tenant import ANYONE, Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.serving.admission_queue import due_at
from tests.router.door import Door, OpenDoor
from tests.router.fake_group import FakeGroup

FULL = 1000


def ask(first: int, priority: int = 0) -> GenerateRequest:
    """A request that is known by its first token."""
    return GenerateRequest(
        token_ids=TokenIds(ids=[first, 5, 6]), sampling=SamplingParams(max_tokens=2, seed=1), priority=priority
    )


def send(door: Door, message: GenerateRequest, tenant: Tenant = ANYONE) -> "asyncio.Task[GenerateResponse]":
    """On its way."""
    return asyncio.create_task(door.router.generation.generate(message, tenant=tenant))


async def waiting(door: Door, count: int) -> None:
    """Waits until so many are in line; each look lets them come."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(door.router.dispatch.line) != count:
            await door.admin.Status(StatusRequest())
    door.router.dispatch.line.check()


def full_group(name: str = "g0", **settings: object) -> FakeGroup:
    """One whose own queue is long."""
    group = FakeGroup(name, **settings)  # type: ignore[arg-type]  # by name
    group.load.status.waiting = FULL
    return group


async def open_full(open_door: OpenDoor, group: FakeGroup, **settings: object) -> Door:
    """A door that has heard that its group is full."""
    door = await open_door(group, **settings)
    link = door.router.groups.link(group.name)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while link is None or link.load.has_room:
            await door.admin.Status(StatusRequest())
    return door


async def test_tenants_share_a_full_cluster_by_weight(open_door: OpenDoor) -> None:
    """While the groups are full nothing is sent; then a flood of one tenant's gets its share and no more, and the
    urgent of a tenant go first."""
    group = full_group()
    door = await open_full(open_door, group)
    flood, heavy = Tenant("flood", weight=1), Tenant("heavy", weight=3)
    asked = [send(door, ask(100), flood) for _ in range(60)]
    await waiting(door, 60)
    asked += [send(door, ask(200, priority=1 if n < 12 else 0), heavy) for n in range(24)]
    await waiting(door, 84)
    assert not group.submits
    group.report(waiting=0)
    answers = await asyncio.gather(*asked)
    assert len(answers) == len(group.submits) == 84
    first = [submit.prompt_token_ids[0] for submit in group.submits[:16]]
    assert 10 <= first.count(200) <= 13  # 12 by weight
    urgent = [submit.priority == 0 for submit in group.submits if submit.prompt_token_ids[0] == 200]
    assert sum(urgent[:9]) >= 7  # one of eight goes whatever its priority
    door.router.dispatch.line.check()


async def test_a_group_is_not_given_more_than_it_can_begin(open_door: OpenDoor) -> None:
    """Without a word from the group the router counts what it has sent, and keeps the rest until something ends."""
    group = FakeGroup(max_num_seqs=4, hold_after=0)
    door = await open_door(group)
    asked = [send(door, ask(100)) for _ in range(20)]
    await waiting(door, 12)  # four run, four are ready there
    await group.until(lambda: len(group.submits) == 8)
    group.go()
    await asyncio.gather(*asked)
    assert len(group.submits) == 20


async def test_how_long_the_line_is_now_is_told(open_door: OpenDoor) -> None:
    """While somebody waits the status and the metrics say for how long; soon after the line is empty, zero."""
    group = full_group()
    door = await open_full(open_door, group)
    assert (await door.admin.Status(StatusRequest())).queue_seconds == 0
    asked = send(door, ask(100))
    await waiting(door, 1)
    first = (await door.admin.Status(StatusRequest())).queue_seconds
    second = (await door.admin.Status(StatusRequest())).queue_seconds
    assert 0 < first < second
    page = door.router.metrics.render().decode().splitlines()
    (line,) = [line for line in page if line.startswith("coatcheck_queue_now_seconds ")]
    assert float(line.split()[1]) > second
    group.report(waiting=0)
    await asked
    line_now = door.router.dispatch.line
    assert line_now.queue_seconds(asyncio.get_running_loop().time() + 2.0) == 0


async def test_short_prompts_do_not_wait_for_long_ones(open_door: OpenDoor) -> None:
    """Of one tenant's in line, one that came a little later with much less to compute goes first; one that came long
    after does not: a long prompt is not overtaken for ever."""
    group = full_group(max_num_seqs=4)
    group.load.status.prefill_tokens_per_second = 1000.0
    door = await open_full(open_door, group)
    now = asyncio.get_running_loop().time()
    long = GenerateRequest(token_ids=TokenIds(ids=[100] * 200), sampling=SamplingParams(max_tokens=2, seed=1))
    asked = [send(door, long)]
    await waiting(door, 1)
    came = asyncio.get_running_loop().time()
    asked.append(send(door, ask(7)))
    await waiting(door, 2)
    assert door.router.dispatch.line.queue_seconds(came + 60.0) > 60.0, "of the long one, though it is not next"
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [7, 100]
    assert due_at(now, 0.2) < due_at(now + 4.1, 0.0)


async def test_a_full_line_refuses_at_once(open_door: OpenDoor) -> None:
    """Past the bound a client hears RESOURCE_EXHAUSTED and when to come again; those in line are served."""
    group = full_group()
    door = await open_full(open_door, group, max_queued=2)
    asked = [send(door, ask(100)) for _ in range(2)]
    await waiting(door, 2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await door.generation.Generate(ask(101))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert b"RetryInfo" in dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]
    displaced = asked.pop()
    asked.append(send(door, ask(102), Tenant("other")))
    with pytest.raises(Overloaded):
        await displaced
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [100, 102]


async def test_a_deadline_or_a_cancel_in_line_ends_it_there(open_door: OpenDoor) -> None:
    """What nobody waits for any more is never sent to a group."""
    group = full_group()
    door = await open_full(open_door, group)
    late = asyncio.ensure_future(door.generation.Generate(ask(1), timeout=0.2))
    gone = door.generation.Generate(ask(2))
    gone_task = asyncio.ensure_future(gone)
    kept = send(door, ask(3))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await late
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await waiting(door, 2)
    gone.cancel()
    await waiting(door, 1)
    group.report(waiting=0)
    await kept
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [3]
    assert gone_task.cancelled() or gone_task.done()
    assert door.router.traffic.active == 0


async def test_those_in_line_outlive_a_group(open_door: OpenDoor) -> None:
    """A group that is killed takes nothing of the line with it: it is served by the next that comes."""
    group = full_group()
    door = await open_full(open_door, group)
    asked = [send(door, ask(100)) for _ in range(5)]
    await waiting(door, 5)
    await group.kill()
    await door.serving(0)
    assert len(door.router.dispatch.line) == 5
    group.load.status.waiting = 0
    await group.start()
    answers = await asyncio.gather(*asked)
    assert [len(answer.choices[0].token_ids) for answer in answers] == [2] * 5


async def test_what_a_full_group_refuses_waits_with_the_router(open_door: OpenDoor) -> None:
    """A group that says RESOURCE_EXHAUSTED is given nothing until its next report, and its client does not notice."""
    group = FakeGroup(refuse=(8, "full"))
    door = await open_door(group)
    asked = [send(door, ask(100)) for _ in range(3)]
    await waiting(door, 3)
    refused = len(group.submits)
    group.refuse = None
    group.report(waiting=0)
    await asyncio.gather(*asked)
    assert len(group.submits) == refused + 3
    assert door.router.dispatch.line.stats().waiting == 0


async def test_a_limited_tenant_is_told_when_to_come(open_door: OpenDoor) -> None:
    """A tenant past its requests a minute is refused before anything is done for it; others are not."""
    door = await open_door(FakeGroup())
    limited = Tenant("limited", requests_per_minute=2)
    for _ in range(2):
        await send(door, ask(1), limited)
    with pytest.raises(Overloaded) as refused:
        await send(door, ask(1), limited)
    assert 25 < refused.value.retry_seconds <= 30
    await send(door, ask(1))


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(open_door: OpenDoor) -> None:
    """Where even a first token would come too late the client hears so, and no group hears of it; with time enough the
    group is told how much there is."""
    group = FakeGroup()
    group.load.queued_prefill_tokens = 20_480  # ten steps of a second, and yet room for more
    group.load.status.step_seconds, group.load.status.prefill_tokens_per_second = 1.0, 1e6
    door = await open_door(group)
    link = door.router.groups.link("g0")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while link is None or not link.load.last.status.step_seconds:
            await door.admin.Status(StatusRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await door.generation.Generate(ask(1), timeout=6)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the first token would take 10.0 s at the least" in (refused.value.details() or "")
    assert not group.submits
    await door.generation.Generate(ask(2), timeout=6000)
    await door.generation.Generate(ask(3))
    (timed, patient) = group.submits
    assert 5000 < timed.seconds_left < 6020 and not patient.HasField("seconds_left")


async def test_a_turn_that_cannot_come_in_time_is_not_waited_for(open_door: OpenDoor) -> None:
    """Judged by how fast the line moves, by those who are ahead in any case, and only once it has moved a while."""
    group = full_group(max_num_seqs=4, hold_after=0)
    door = await open_full(open_door, group)
    line, now = door.router.dispatch.line, asyncio.get_running_loop().time
    anywhere = EligibleGroups.of(door.router.groups.serving())
    asked = [send(door, ask(100)) for _ in range(12)]
    await waiting(door, 12)
    line.require_room(ANYONE, 0, now() + 80, now() + 80, anywhere)  # it has not moved yet
    group.report(waiting=0)
    await waiting(door, 4)  # eight are with the group
    later = now() + 80  # ten seconds for each that has gone
    with pytest.raises(DeadlineExceeded, match="4 requests wait before it, which takes about 4[0-9].* s"):
        line.require_room(ANYONE, 0, later, later + 15, anywhere)
    line.require_room(ANYONE, 0, later, later + 30, anywhere)
    line.require_room(ANYONE, 0, later, None, anywhere)
    line.require_room(ANYONE, -1, later, later + 1, anywhere)  # more urgent than all that wait
    line.require_room(Tenant("other"), 0, later, later + 1, anywhere)
    group.go()
    await asyncio.gather(*asked)


async def test_who_is_late_in_line_is_not_sent(open_door: OpenDoor) -> None:
    """Whoever's deadline came while they waited hears so when there is room, which others get."""
    group = full_group()
    door = await open_full(open_door, group)
    deadline = asyncio.get_running_loop().time() + 1.0
    late = asyncio.create_task(door.router.generation.generate(ask(1), deadline=deadline))
    kept = send(door, ask(2))
    await waiting(door, 2)
    await asyncio.sleep(deadline - asyncio.get_running_loop().time())
    group.report(waiting=0)
    with pytest.raises(DeadlineExceeded, match="its deadline came after"):
        await late
    await kept
    assert [submit.prompt_token_ids[0] for submit in group.submits] == [2]


def ask_long(first: int, tokens: int = 100) -> GenerateRequest:
    """One that a group of 32 tokens cannot hold."""
    return GenerateRequest(token_ids=TokenIds(ids=[first] * tokens), sampling=SamplingParams(max_tokens=2, seed=1))


async def test_a_prompt_that_no_group_has_room_for_holds_up_nobody_else(open_door: OpenDoor) -> None:
    """While the only group that could hold a long prompt is full, short ones of its own tenant and of others go to
    another group at once. The long one keeps its place: it is the first to be sent once its group has room."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large")
    for group in (small, large):
        group.load.status.prefill_tokens_per_second = 1e9  # so that nobody is due much later for its length
    door = await open_full(open_door, large)
    door.groups.append(small)
    await door.router.set_groups([door.router.groups.link("large").address, await small.start()])  # type: ignore[union-attr]
    await door.serving(2)
    one, other = Tenant("one"), Tenant("other")
    long = send(door, ask_long(100), one)
    await waiting(door, 1)
    async with asyncio.timeout(10):
        await send(door, ask(7), other)
        await send(door, ask(8), one)
    assert [submit.prompt_token_ids[0] for submit in small.submits] == [7, 8] and not long.done()
    small.report(waiting=FULL)
    link = door.router.groups.link("small")
    async with asyncio.timeout(10):
        while link is None or link.load.has_room:
            await door.admin.Status(StatusRequest())
    asked = [send(door, ask(number), one) for number in (9, 10)]
    await waiting(door, 3)
    large.report(waiting=0)
    await asyncio.gather(long, *asked)
    assert large.submits[0].prompt_token_ids[0] == 100
    assert door.router.dispatch.line.stats().waiting == 0


async def test_a_waiting_request_goes_to_a_new_group_that_can_hold_it(open_door: OpenDoor) -> None:
    """A short and a long prompt wait for the only group there is: when a small one joins, the short one goes there,
    though the long one came first and must go on waiting."""
    large, small = full_group("large"), FakeGroup("small", num_blocks=8)
    large.load.status.prefill_tokens_per_second = 1e9  # so that the long one is not due much later for its length
    door = await open_full(open_door, large)
    long = send(door, ask_long(100))
    await waiting(door, 1)
    short = send(door, ask(7))
    await waiting(door, 2)
    door.groups.append(small)
    await door.router.set_groups([door.router.groups.link("large").address, await small.start()])  # type: ignore[union-attr]
    async with asyncio.timeout(10):
        await short
    assert len(small.submits) == 1 and not long.done()
    large.report(waiting=0)
    await long


async def test_a_deadline_is_not_judged_by_those_that_wait_for_other_groups(open_door: OpenDoor) -> None:
    """Long prompts that wait for the only group that can hold them are not ahead of a short one in any case."""
    small, large = FakeGroup("small", num_blocks=8), full_group("large", max_num_seqs=4, hold_after=0)
    door = await open_full(open_door, large)
    asked = [send(door, ask_long(100)) for _ in range(20)]
    await waiting(door, 20)
    large.report(waiting=0)
    await waiting(door, 12)  # it has moved
    line, now = door.router.dispatch.line, asyncio.get_running_loop().time() + 100
    with pytest.raises(DeadlineExceeded, match="12 requests wait before it"):
        line.require_room(ANYONE, 0, now, now + 1, EligibleGroups.of(door.router.groups.serving()))
    door.groups.append(small)
    await door.router.set_groups([door.router.groups.link("large").address, await small.start()])  # type: ignore[union-attr]
    await door.serving(2)
    line.require_room(ANYONE, 0, now, now + 1, EligibleGroups.of(door.router.groups.serving()))
    large.go()
    await asyncio.gather(*asked)
