"""Requests that groups return because other routers were faster, end to end."""

import asyncio

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.router.serving.generate_service import CallOptions
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

PROMPT = GenerateRequest(token_ids=TokenIds(ids=[7] * 40), sampling=SamplingParams(max_tokens=6, seed=1))


async def share_groups(router: RouterUnderTest, *groups: FakeGroup) -> None:
    """Lets the groups report submissions of other routers until the router knows of them."""
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        for group in groups:
            connection = router.server.groups.find_connection(group.name)
            while connection is None or connection.load.max_queued_tokens(0) is None:
                group.other_submissions += 1
                group.report(waiting=0)
                await router.admin.Status(StatusRequest())


async def generate(router: RouterUnderTest) -> GenerateResponse:
    return await asyncio.wait_for(router.server.generation.generate(PROMPT, CallOptions()), MAX_WAIT_SECONDS)


async def test_without_other_routers_nothing_is_returned(start_router: StartRouter) -> None:
    """A router that alone sends requests to a group never lets the group return one."""
    group = FakeGroup()
    group.queued_tokens = 1_000_000
    router = await start_router(group)
    await generate(router)
    assert not group.submits[0].HasField("max_queued_tokens") and not group.returned


async def test_a_returned_request_goes_to_the_group_that_is_free(start_router: StartRouter) -> None:
    """Each group that other routers have filled since its report returns the request with its true queue; the next
    decision knows it. The client sees one answer, the same as from a group alone."""
    busy, other, free = groups = [FakeGroup(f"g{place}") for place in range(3)]
    router = await start_router(*groups)
    wanted = list((await generate(router)).choices[0].token_ids)
    await share_groups(router, *groups)
    busy.queued_tokens = other.queued_tokens = 5_000
    for _ in range(8):  # whichever group is drawn first
        answer = await generate(router)
        assert answer.final.group == "g2" and answer.final.moves == 0
        assert list(answer.choices[0].token_ids) == wanted
        for group in groups:
            router.server.groups.find_connection(group.name).load.check()  # type: ignore[union-attr]
            group.report(waiting=0)
    assert busy.returned + other.returned and not free.returned
    assert len(router.server.dispatcher.queue) == 0


async def test_no_request_is_returned_for_ever(start_router: StartRouter) -> None:
    """When every group returns a request, the fourth one must keep the request."""
    groups = [FakeGroup(f"g{place}") for place in range(2)]
    router = await start_router(*groups)
    await share_groups(router, *groups)
    for group in groups:
        group.returns_all = True
    answer = await generate(router)
    sent = [submit for group in groups for submit in group.submits]
    assert len(answer.choices[0].token_ids) == 6 and answer.final.moves == 0
    assert sum(group.returned for group in groups) == 3
    assert sorted(submit.HasField("max_queued_tokens") for submit in sent) == [False, True, True, True]


async def test_a_request_that_has_lost_its_group_is_not_returned(start_router: StartRouter) -> None:
    """The next group keeps the request however long its queue is: the client has waited already."""
    groups = [FakeGroup(f"g{place}", hold_after=2) for place in range(2)]
    router = await start_router(*groups)
    await share_groups(router, *groups)
    answer = asyncio.create_task(generate(router))
    while not any(group.sent == 2 for group in groups):
        await router.admin.Status(StatusRequest())
    first, second = sorted(groups, key=lambda group: -group.sent)
    second.returns_all = True
    second.go()
    await first.kill()
    assert (await answer).final.moves == 1 and not second.returned
    assert not second.submits[0].HasField("max_queued_tokens")
