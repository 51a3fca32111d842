"""Poison requests end to end: two crashes in a row refuse a request, and the requests beside it are answered."""

import asyncio
import logging
from dataclasses import replace
from functools import partial

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import Unavailable
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, GenerateResponse, GetModelResponse, TokenIds
from coatcheck.router.groups.group_connection import group_kind
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.serving.admission_queue import Attempt
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed

POISON = 7
LIFECYCLE = RequestLifecycle(RequestMetrics(CollectorRegistry()))
CRASH = "rank 0: RuntimeError: an illegal memory access"


def poison_request() -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=[POISON]), sampling=ask().sampling)


async def refusal(asking: "asyncio.Future[GenerateResponse]") -> str:
    """The details of the ABORTED status."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.code() is grpc.StatusCode.ABORTED
    return refused.value.details() or ""


async def test_two_crashes_refuse_a_request(start_router: StartRouter, caplog: pytest.LogCaptureFixture) -> None:
    """A request that crashes two groups in a row, as their failure notices say, is refused, and no third group gets it.
    The log counts one move."""
    caplog.set_level(logging.INFO)
    groups = [FakeGroup(name, poison=POISON, failure_notice=CRASH) for name in ("a", "b", "c")]
    router = await start_router(*groups)
    said = await refusal(asyncio.ensure_future(router.generation.Generate(poison_request())))
    assert "2 groups in a row crashed" in said and CRASH in said
    assert sorted(len(group.submits) for group in groups) == [0, 1, 1]
    (ended,) = [record for record in caplog.records if record.message == "request ended"]
    assert (ended.outcome, ended.moves) == ("aborted", 1)  # type: ignore[attr-defined]  # fields of its own


@pytest.mark.parametrize(("crash", "sent"), [("rank 0: Segmentation fault", 2), ("", 3)], ids=["crash", "killed"])
async def test_a_cause_that_the_supervisor_reports_later_counts(
    start_router: StartRouter, crash: str, sent: int
) -> None:
    """Groups end without a failure notice, as in a segmentation fault: the request waits for the causes that the
    supervisor reports, and is refused if both crashed. If they were killed, a third loss is needed."""
    groups = [FakeGroup(name, die_on_submit=True) for name in ("a", "b", "c")]
    router = await start_router(*groups, cause_wait_seconds=60.0)
    addresses = {connection.name: connection.endpoint for connection in router.server.groups.connections}
    asking = asyncio.ensure_future(router.generation.Generate(ask()))
    lost: list[FakeGroup] = []
    while len(lost) < sent:
        lost.append(await next_to_receive([group for group in groups if group not in lost]))
        if len(lost) > 1:
            assert not asking.done(), "the request waits for the causes of the losses"
            for group in lost:
                ended = replace(addresses[group.name], state="lost", incarnation=1, previous_crash=crash)
                addresses[group.name] = ended
            await router.server.set_groups(list(addresses.values()))
    said = await refusal(asking)
    assert ("in a row crashed" in said) == bool(crash) and f"{sent} groups in a row" in said
    assert sum(len(group.submits) for group in groups) == sent


async def next_to_receive(groups: list[FakeGroup]) -> FakeGroup:
    """Waits for the first of `groups` that receives a request, and returns it."""
    waits = [asyncio.ensure_future(group.until(partial(_has_submits, group))) for group in groups]
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return groups[waits.index(done.pop())]


@pytest.mark.parametrize("failure_notice", [CRASH, ""], ids=["known", "unknown"])
async def test_requests_beside_a_poison_request_are_answered(start_router: StartRouter, failure_notice: str) -> None:
    """Of the requests on the lost groups only the poison one is refused: at the second loss if the groups send failure
    notices, else at a third, on a group where it runs alone."""
    groups = [FakeGroup(name, hold_after=0, poison=POISON, failure_notice=failure_notice) for name in ("a", "b")]
    router = await start_router(*groups)
    _, ids = await undisturbed(start_router, ask())
    others = [Stream(router, ask()) for _ in range(12)]  # on both groups
    for stream in others:
        await stream.read()
    asking = asyncio.ensure_future(router.generation.Generate(poison_request()))
    for group in groups:
        group.go()
    assert ("2 groups in a row crashed" in await refusal(asking)) == bool(failure_notice)
    for stream in others:
        await stream.finish()
        assert stream.ids == ids
    tries = sum(list(submit.prompt_token_ids) == [POISON] for group in groups for submit in group.submits)
    assert tries == (2 if failure_notice else 3)


async def test_streams_with_tokens_continue_before_a_suspect_without(start_router: StartRouter) -> None:
    """After a crash, streams that had tokens continue before the request that had none, so that they get tokens again
    before it crashes the next group."""
    group = FakeGroup(hold_after=3, failure_notice=CRASH, poison=POISON)
    _, ids = await undisturbed(start_router, ask())
    router = await start_router(group)
    streams = [Stream(router, ask()) for _ in range(5)]
    for stream in streams:
        while len(stream.ids[0]) < 3:
            await stream.read()
    asking = asyncio.ensure_future(router.generation.Generate(poison_request()))
    await group.until(lambda: len(group.submits) == 7)  # one of the six is on the group again, and holds
    group.go()
    assert "2 groups in a row" in await refusal(asking)
    again = [list(submit.prompt_token_ids) == [POISON] for submit in group.submits[6:12]]
    assert again == [False] * 5 + [True]
    for stream in streams:
        await stream.finish()
        assert stream.ids == ids


async def test_a_suspect_that_is_queued_stays_a_suspect(start_router: StartRouter) -> None:
    """A full group refuses a request that the crash of another group has made a suspect. Sent from the queue, the
    request is as suspect as before."""
    group, full = FakeGroup("a", hold_after=0), FakeGroup("b", refuse=(8, "full"))
    router = await start_router(group, full)
    _, ids = await undisturbed(start_router, ask())
    stream = Stream(router, ask())
    await group.until(lambda: len(group.submits) == 1)
    group.crash(CRASH)
    await group.until(lambda: len(group.submits) == 2)
    assert full.submits
    connection = router.server.groups.find_connection("a")
    assert connection is not None and connection.submissions.suspicion == 2
    group.go()
    await stream.finish()
    assert stream.ids == ids


async def test_a_cancelled_suspect_delays_no_other(start_router: StartRouter) -> None:
    """Two suspects wait for a group. The first is cancelled at the moment when the group is free: the second gets the
    group."""
    group = FakeGroup(hold_after=0)
    dispatcher = (await start_router(group)).server.dispatcher

    def place() -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=20, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=60.0))

    there = await place()
    first, waits = place(), place()
    await group.until(lambda: len(group.submits) == 1)  # by then both wait
    assert not waits.done() and not first.done()
    there.close(finished=False)
    first.cancel()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        (await waits).close(finished=False)
    assert first.cancelled()


async def test_suspects_of_different_kinds_of_groups_do_not_delay_each_other(start_router: StartRouter) -> None:
    """Suspects wait separately for groups that differ only in their KV dtype: a suspect that waits for one kind does
    not delay a suspect of the other."""
    one = FakeGroup("a", hold_after=0)
    model = GetModelResponse()
    model.CopyFrom(one.model)
    model.kv_dtype = "int8"
    other = FakeGroup("b", hold_after=0, model=model)
    dispatcher = (await start_router(one, other)).server.dispatcher

    def place(like: GetModelResponse) -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=20, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, group_kind=group_kind(like), suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=60.0))

    there = await place(one.model)
    waits = place(one.model)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        elsewhere = await place(model)
    assert elsewhere.group == "b" and not waits.done()
    there.close(finished=False)
    assert (await waits).group == "a"


async def test_a_suspect_that_fits_no_group_delays_no_other(start_router: StartRouter) -> None:
    """A suspect that no serving group can hold waits; a smaller suspect runs meanwhile."""
    small = FakeGroup("a", hold_after=0, num_blocks=8)
    dispatcher = (await start_router(small)).server.dispatcher

    def place(max_tokens: int, wait_seconds: float) -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, {0: [9]}, group_kind=group_kind(small.model), suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=wait_seconds))

    there = await place(20, 10.0)
    large, next_one = place(100, 0.05), place(20, 10.0)
    there.close(finished=False)
    assert (await next_one).group == "a"
    with pytest.raises(Unavailable, match="no group that could continue it is serving"):
        await large


async def test_unstarted_requests_are_no_suspects(start_router: StartRouter) -> None:
    """A failure notice names the requests that had not started: they are no suspects, and run together at once."""
    group = FakeGroup(hold_after=0)
    router = await start_router(group)
    streams = [Stream(router, ask()) for _ in range(6)]
    for stream in streams:
        await stream.read()
    await group.until(lambda: len(group.submits) == 6)
    group.crash(CRASH, unstarted=range(2, 7))
    await group.until(lambda: len(group.submits) == 12)
    group.go()
    for stream in streams:
        await stream.finish()


def _has_submits(group: FakeGroup) -> bool:
    return bool(group.submits)
