"""A stream that lost its router: what limits and queue of the next router ask of it, with and without a ticket."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidRequest, Overloaded, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, GenerateResponse, StatusRequest
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.serving.generate_service import CallOptions
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter
from tests.router.stream import Stream, ask, undisturbed

KEY = b"k" * 32


async def lost_stream(start_router: StartRouter, key: bytes = KEY) -> tuple[GenerateRequest, list[int]]:
    """The resume of a request whose router is gone after 6 tokens, and the tokens of the whole answer."""
    _, (ids,) = await undisturbed(start_router, ask())
    router = await start_router(FakeGroup(hold_after=6), resume_key=key)
    stream = Stream(router, ask())
    started = (await stream.read()).started
    while len(stream.ids[0]) < 6:
        await stream.read()
    await router.close()
    request = ask()
    request.request_id, request.resume_ticket = started.request_id, started.resume_ticket
    request.resume.add(token_ids=ids[:6])
    return request, ids


def without_ticket(request: GenerateRequest) -> GenerateRequest:
    """The resume that a client of an older version sends."""
    copy = GenerateRequest()
    copy.CopyFrom(request)
    copy.ClearField("resume_ticket")
    return copy


async def generate(router: RouterUnderTest, request: GenerateRequest, tenant: Tenant = ANONYMOUS) -> GenerateResponse:
    call = router.server.generation.generate(request, CallOptions(tenant=tenant))
    return await asyncio.wait_for(call, MAX_WAIT_SECONDS)


async def test_only_a_ticket_passes_the_rate_limit(start_router: StartRouter) -> None:
    """A resume without a ticket, or with one of another tenant or cluster, counts as a new request. Its tokens are the
    rest of the same answer."""
    request, ids = await lost_stream(start_router)
    router = await start_router(FakeGroup(), resume_key=KEY)
    tenant = Tenant("anonymous", requests_per_minute=1)
    resumed = await generate(router, without_ticket(request), tenant)
    assert list(resumed.choices[0].token_ids) == ids[6:]
    for refused in (without_ticket(request), ask()):
        with pytest.raises(Overloaded, match="1 requests a minute"):
            await generate(router, refused, tenant)
    resumed = await generate(router, request, tenant)
    assert list(resumed.choices[0].token_ids) == ids[6:]
    assert resumed.started.resume_ticket == request.resume_ticket
    other = Tenant("other", requests_per_minute=1)
    await generate(router, request, other)
    with pytest.raises(Overloaded):
        await generate(router, request, other)


async def test_a_ticket_does_not_make_a_huge_request_cheaper(start_router: StartRouter) -> None:
    """A tenant over its rate limit is refused before its message is checked, also with a forged ticket. With a genuine
    ticket the number of entries is checked before they are hashed."""
    request, _ = await lost_stream(start_router)
    router = await start_router(FakeGroup(), resume_key=KEY)
    tenant = Tenant("anonymous", requests_per_minute=1)
    await generate(router, without_ticket(request), tenant)
    huge = without_ticket(request)
    huge.sampling.stop.extend([""] * 20_000)
    for forged in (b"x", bytes(72)):
        huge.resume_ticket = forged
        with pytest.raises(Overloaded, match="1 requests a minute"):
            await generate(router, huge, tenant)
    huge.resume_ticket = request.resume_ticket
    with pytest.raises(InvalidRequest, match="stop has 20000 entries"):
        await generate(router, huge, tenant)


async def test_only_a_ticket_passes_the_queue(start_router: StartRouter) -> None:
    """While no group has room and the queue is full, a resume with a ticket runs at once; one without is refused."""
    request, ids = await lost_stream(start_router)
    group = FakeGroup()
    group.load.status.waiting = 1000
    router = await start_router(group, resume_key=KEY, max_queued=0)
    connection = router.server.groups.find_connection(group.name)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while connection is None or connection.load.has_room:
            await router.admin.Status(StatusRequest())
    for refused in (without_ticket(request), ask()):
        with pytest.raises(Overloaded, match="the queue is full"):
            await generate(router, refused)
    assert list((await generate(router, request)).choices[0].token_ids) == ids[6:]


async def test_a_ticket_of_a_router_with_another_key_is_replaced(start_router: StartRouter) -> None:
    """A cluster that was started anew has another key: the resume counts as a new request, and gets a new ticket."""
    request, ids = await lost_stream(start_router, key=b"")
    router = await start_router(FakeGroup(), resume_key=KEY)
    tenant = Tenant("anonymous", requests_per_minute=1)
    resumed = await generate(router, request, tenant)
    assert list(resumed.choices[0].token_ids) == ids[6:] and resumed.started.resume_ticket != request.resume_ticket
    with pytest.raises(Overloaded):
        await generate(router, request, tenant)
    request.resume_ticket = resumed.started.resume_ticket
    await generate(router, request, tenant)


async def test_a_resume_with_a_ticket_waits_for_a_group(start_router: StartRouter) -> None:
    """While no group serves, a new request is refused, and a resume without a ticket too. One with a ticket waits."""
    request, ids = await lost_stream(start_router)
    group = FakeGroup()
    router = await start_router(group, resume_key=KEY)
    await group.kill()
    await router.wait_for_groups(0)
    stream = Stream(router, request)
    reading = asyncio.ensure_future(stream.finish())
    for refused in (without_ticket(request), ask()):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generation.Generate(refused)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not reading.done()
    await group.start()
    await reading
    assert stream.ids[0] == ids[6:]


def other_kind() -> FakeGroup:
    """A group that computes the same model with another type of KV cache, and therefore other bits."""
    group = FakeGroup("other")
    group.model.kv_dtype = "fp8"
    return group


async def test_a_resume_continues_on_a_group_of_its_own_kind(start_router: StartRouter) -> None:
    """The ticket has the kind of group that computed the tokens: the resume waits for one, while another kind serves. A
    resume without a ticket, as of an older client, goes to any group."""
    request, ids = await lost_stream(start_router)
    other, group = other_kind(), FakeGroup("same")
    router = await start_router(other, resume_key=KEY)
    stream = Stream(router, request)
    reading = asyncio.ensure_future(stream.finish())
    assert (await generate(router, without_ticket(request))).final.group == "other"
    assert not reading.done()
    router.groups.append(group)
    connection = router.server.groups.find_connection("other")
    assert connection is not None
    await router.server.set_groups([connection.endpoint, await group.start()])
    assert (await asyncio.wait_for(reading, MAX_WAIT_SECONDS)).final.group == "same"
    assert stream.ids[0] == ids[6:]


@pytest.mark.parametrize("tenant", [ANONYMOUS, Tenant("stranger")], ids=["admitted", "queued as a new request"])
async def test_a_resume_does_not_wait_for_its_kind_for_ever(start_router: StartRouter, tenant: Tenant) -> None:
    """Without a group of its kind it fails after `move_wait_seconds`, also if its ticket admits it no more and it waits
    in the queue. Requests that the other group can run are not refused with it."""
    request, _ = await lost_stream(start_router)
    other = other_kind()
    router = await start_router(other, resume_key=KEY, move_wait_seconds=0.2)
    await router.wait_for_groups(1)
    with pytest.raises(Unavailable, match="no group that could continue it is serving"):
        await generate(router, request, tenant)
    router.server.dispatcher.queue.check()
    assert (await generate(router, ask())).final.group == "other"


async def test_a_resumed_stream_that_moves_again_keeps_its_kind(start_router: StartRouter) -> None:
    """The group that continues a resume is lost before it has sent anything: the next one is of the same kind."""
    request, ids = await lost_stream(start_router)
    first, other, second = FakeGroup("first", hold_after=6), other_kind(), FakeGroup("second")
    router = await start_router(first, resume_key=KEY)
    stream = Stream(router, request)
    assert (await stream.read()).started.group == "first"
    router.groups += [other, second]
    connection = router.server.groups.find_connection("first")
    assert connection is not None
    await router.server.set_groups([connection.endpoint, await other.start(), await second.start()])
    await router.wait_for_groups(3)
    await first.kill()
    assert (await stream.finish()).final.group == "second"
    assert stream.ids[0] == ids[6:]


async def test_a_request_that_moves_to_another_kind_gets_its_ticket(start_router: StartRouter) -> None:
    """Before the first output the request moves to a group of another kind. The first delta has a ticket with this
    kind, and the resume goes there although a group of the first kind serves."""
    _, (ids,) = await undisturbed(start_router, ask())
    first, other = FakeGroup("first", hold_after=0), other_kind()
    other.hold_after = 6
    router = await start_router(first, resume_key=KEY)
    stream = Stream(router, ask())
    started = (await stream.read()).started
    router.groups.append(other)
    connection = router.server.groups.find_connection("first")
    assert connection is not None
    await router.server.set_groups([connection.endpoint, await other.start()])
    await router.wait_for_groups(2)
    await first.kill()
    while len(stream.ids[0]) < 6:
        await stream.read()
    tickets = [event.delta.resume_ticket for event in stream.events if event.HasField("delta")]
    assert tickets[0] and not any(tickets[1:]) and tickets[0] != started.resume_ticket
    await router.close()

    request = ask()
    request.request_id, request.resume_ticket = started.request_id, tickets[0]
    request.resume.add(token_ids=ids[:6])
    router = await start_router(FakeGroup("first"), other_kind(), resume_key=KEY)
    await router.wait_for_groups(2)
    resumed = await generate(router, request, Tenant("anonymous", requests_per_minute=1))
    assert resumed.final.group == "other" and list(resumed.choices[0].token_ids) == ids[6:]


async def test_a_stream_without_output_has_a_ticket_too(start_router: StartRouter) -> None:
    """A client that has only Started was admitted as well."""
    router = await start_router(FakeGroup(hold_after=0), resume_key=KEY)
    stream = Stream(router, GenerateRequest(text="a fox"))
    started = (await stream.read()).started
    await router.close()
    request = GenerateRequest(text="a fox", request_id=started.request_id, resume_ticket=started.resume_ticket)
    request.sampling.seed = started.seed
    tenant = Tenant("anonymous", requests_per_minute=1)
    router = await start_router(FakeGroup(), resume_key=KEY)
    for _ in range(3):
        await generate(router, request, tenant)
