"""Explain and the audit end to end: the terms of a decision for callers that ask, and a group that differs from its
events."""

import grpc
import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import Explanation, GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.proto.stubs.worker_pb2 import FromGroup, Load
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter
from tests.router.routing.reported_prefix import PROMPT, blocks

ASKED = (("coatcheck-explain", "1"),)


def ask() -> GenerateRequest:
    """A request for the prompt whose blocks are `blocks()`."""
    return GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=2, seed=1))


async def two_groups(start_router: StartRouter) -> tuple[RouterUnderTest, FakeGroup]:
    """A router with a group that holds most of the prompt, and one that holds nothing."""
    holder = FakeGroup("holder")
    holder.blocks = blocks()[:8]
    router = await start_router(holder, FakeGroup("other"))
    while router.server.groups.index.entries != 8:
        await router.admin.Status(StatusRequest())
    return router, holder


async def test_a_dry_run_tells_every_group_s_cost_and_sends_nothing(start_router: StartRouter) -> None:
    """The cheapest group comes first, with its cached tokens; nothing is sent, and nothing is expected."""
    router, holder = await two_groups(start_router)
    told: Explanation = await router.admin.Explain(ask())
    assert told.group == "holder" and told.prompt_tokens == 40 and told.why.startswith("holder: ")
    assert [(cost.group, cost.device_tokens) for cost in told.costs] == [("holder", 32), ("other", 0)]
    totals = [cost.total_seconds for cost in told.costs]
    assert totals == sorted(totals) and totals[0] < totals[1]
    assert told.costs[1].prefill_seconds == pytest.approx(0.04)  # 40 tokens at 1,000 a second
    assert not holder.submits and len(router.server.groups.index.expected_blocks) == 0


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_that_asks_gets_its_terms_when_it_ends(start_router: StartRouter, method: str) -> None:
    """The terms are in trailing metadata, under a key that ends in -bin; a call that does not ask gets none."""
    router, _ = await two_groups(start_router)
    for metadata in (ASKED, ()):
        call = getattr(router.generation, method)(ask(), metadata=metadata)
        if method == "GenerateStream":
            async for _ in call:
                pass
        trailing = dict(await call.trailing_metadata())
        if metadata:
            told = Explanation.FromString(trailing["coatcheck-explanation-bin"])
            assert told.group == "holder" and len(told.costs) == 2
        else:
            assert "coatcheck-explanation-bin" not in trailing


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_that_fails_keeps_its_terms(start_router: StartRouter, method: str) -> None:
    """The error of a group that refuses the request comes with its details and with the terms of the decision."""
    router = await start_router(FakeGroup("only", refuse=(grpc.StatusCode.INVALID_ARGUMENT.value[0], "no")))
    call = getattr(router.generation, method)(ask(), metadata=ASKED)
    with pytest.raises(grpc.aio.AioRpcError):
        if method == "GenerateStream":
            async for _ in call:
                pass
        else:
            await call
    trailing = dict(await call.trailing_metadata())
    assert Explanation.FromString(trailing["coatcheck-explanation-bin"]).group == "only"
    assert "grpc-status-details-bin" in trailing


async def test_a_dry_run_is_refused_as_the_request_would_be(start_router: StartRouter) -> None:
    """A dry run is refused for the same errors as the request, and while no group serves."""
    router, _ = await two_groups(start_router)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.admin.Explain(GenerateRequest(token_ids=TokenIds(ids=[1] * 1000)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for group in router.groups:
        await group.kill()
    await router.wait_for_groups(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.admin.Explain(ask())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_sent_prompt_attracts_others_with_its_prefix_at_once(start_router: StartRouter) -> None:
    """While a prompt waits in a group's queue its prefix counts as expected there; after its end no longer."""
    group = FakeGroup("busy", hold_after=0)
    router = await start_router(group, FakeGroup("idle", hold_after=0))
    first = router.generation.GenerateStream(ask())
    where = (await first.read()).started.group
    told = await router.admin.Explain(ask())
    (cost,) = [cost for cost in told.costs if cost.group == where]
    assert cost.expected_tokens == 36 and cost.queue_seconds > 0
    first.cancel()
    while len(router.server.groups.index.expected_blocks):
        await router.admin.Status(StatusRequest())


async def test_the_audit_is_exported_and_a_divergent_group_is_asked_for_a_snapshot(start_router: StartRouter) -> None:
    """A group that finds far fewer cached tokens than its events predict is asked for a snapshot, and the status counts
    the divergence."""
    group = FakeGroup(finds=4)  # one block
    group.blocks = blocks()
    router = await start_router(group)
    while router.server.groups.index.entries != 10:
        await router.admin.Status(StatusRequest())
    for _ in range(16):
        await router.generation.Generate(ask())
    await group.until(lambda: group.snapshot_requests == 1)
    (status,) = (await router.admin.Status(StatusRequest())).groups
    assert (status.audit.prompts, status.audit.divergences) == (16, 1)
    assert (status.audit.predicted_tokens, status.audit.found_tokens) == (16 * 36, 16 * 4)
    assert status.audit.error_tokens == 16 * 32


async def test_a_reported_queue_is_part_of_the_cost(start_router: StartRouter) -> None:
    """A queue that the group reports is part of every later cost."""
    router, holder = await two_groups(start_router)
    load = Load()
    load.CopyFrom(holder.load)
    load.queued_prefill_tokens = 5000
    holder.send(FromGroup(load=load))
    while (told := await router.admin.Explain(ask())).group == "holder":
        pass
    assert told.costs[1].queue_seconds == pytest.approx(5.0)


async def test_a_full_group_is_refused_with_the_reason_and_never_chosen(start_router: StartRouter) -> None:
    """As for a request, a full group is no candidate, even if it holds the prompt. Its cost is shown with the reason,
    after those of the candidates. While no group has room, the text says that the request would wait."""
    router, holder = await two_groups(start_router)
    holder.report(waiting=9)
    while not (told := await router.admin.Explain(ask())).costs[-1].refused:
        assert told.costs[1].group == "other"
    assert told.group == "other" and "waits" not in told.why
    assert [(cost.group, cost.device_tokens, cost.refused) for cost in told.costs] == [
        ("other", 0, ""),
        ("holder", 32, "full: 9 sequences wait there; the limit is 4"),
    ]
    sent = await router.generation.Generate(ask())
    assert sent.final.group == told.group

    router.groups[1].report(waiting=5)
    while (told := await router.admin.Explain(ask())).group == "other":
        pass
    assert told.group == "holder" and told.why.endswith("; no group has room now: the request would wait in the router")
    assert all(cost.refused.startswith("full: ") for cost in told.costs)


async def test_a_group_without_room_is_refused_unless_it_holds_more(start_router: StartRouter) -> None:
    """A group whose queue is at the limit is excluded if another with room holds as much of the prompt."""
    router, holder = await two_groups(start_router)
    for group in router.groups:
        load = Load()
        load.CopyFrom(group.load)
        load.queued_prefill_tokens = 0 if group is holder else 5000
        group.send(FromGroup(load=load))
    while not (told := await router.admin.Explain(ask())).costs[1].refused:
        pass
    assert told.costs[1].refused == "no room: enough prompt tokens are queued there"
    assert not told.costs[0].refused and told.group == "holder"
