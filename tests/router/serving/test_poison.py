"""A request that ends groups: two that end by themselves are enough, and who was beside it is answered all the same."""

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


def poisonous() -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=[POISON]), sampling=ask().sampling)


async def refusal(asking: "asyncio.Future[GenerateResponse]") -> str:
    """Why it is refused as poison."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.code() is grpc.StatusCode.ABORTED
    return refused.value.details() or ""


async def test_two_groups_that_end_by_themselves_are_enough(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that ends two groups in a row, as their last words say, is refused; no third one sees it. It has moved
    once, says the log."""
    caplog.set_level(logging.INFO)
    groups = [FakeGroup(name, poison=POISON, failure_notice=CRASH) for name in ("a", "b", "c")]
    router = await start_router(*groups)
    said = await refusal(asyncio.ensure_future(router.generation.Generate(poisonous())))
    assert "2 groups in a row ended by themselves" in said and CRASH in said
    assert sorted(len(group.submits) for group in groups) == [0, 1, 1]
    (ended,) = [record for record in caplog.records if record.message == "request ended"]
    assert (ended.outcome, ended.moves) == ("aborted", 1)  # type: ignore[attr-defined]  # fields of its own


@pytest.mark.parametrize(("crash", "sent"), [("rank 0: Segmentation fault", 2), ("", 3)], ids=["crash", "killed"])
async def test_what_the_supervisor_learns_a_moment_later_counts(
    start_router: StartRouter, crash: str, sent: int
) -> None:
    """Groups that end without a word, as in a segmentation fault: the request waits for what the next incarnations
    find, and is refused then; where those were ended from outside it takes a third."""
    groups = [FakeGroup(name, die_on_submit=True) for name in ("a", "b", "c")]
    router = await start_router(*groups, cause_wait_seconds=60.0)
    addresses = {link.name: link.endpoint for link in router.server.groups.connections}
    asking = asyncio.ensure_future(router.generation.Generate(ask()))
    lost: list[FakeGroup] = []
    while len(lost) < sent:
        lost.append(await next_to_receive([group for group in groups if group not in lost]))
        if len(lost) > 1:
            assert not asking.done(), "it waits to learn how they ended"
            for group in lost:
                ended = replace(addresses[group.name], state="lost", incarnation=1, previous_crash=crash)
                addresses[group.name] = ended
            await router.server.set_groups(list(addresses.values()))
    said = await refusal(asking)
    assert ("by themselves" in said) == bool(crash) and f"{sent} groups in a row" in said
    assert sum(len(group.submits) for group in groups) == sent


async def next_to_receive(groups: list[FakeGroup]) -> FakeGroup:
    """Of groups that have received nothing, the first that does."""
    waits = [asyncio.ensure_future(group.until(partial(_has_submits, group))) for group in groups]
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return groups[waits.index(done.pop())]


@pytest.mark.parametrize("failure_notice", [CRASH, ""], ids=["known", "unknown"])
async def test_who_was_beside_a_poisonous_request_is_answered(start_router: StartRouter, failure_notice: str) -> None:
    """Of the requests on the lost groups only the one that ended them is refused: the second group is enough where
    each says that it ends by itself, else it takes a third, on which it runs apart."""
    groups = [FakeGroup(name, hold_after=0, poison=POISON, failure_notice=failure_notice) for name in ("a", "b")]
    router = await start_router(*groups)
    _, ids = await undisturbed(start_router, ask())
    innocent = [Stream(router, ask()) for _ in range(12)]  # some on either
    for stream in innocent:
        await stream.read()
    asking = asyncio.ensure_future(router.generation.Generate(poisonous()))
    for group in groups:
        group.go()
    assert ("by themselves" in await refusal(asking)) == bool(failure_notice)
    for stream in innocent:
        await stream.finish()
        assert stream.ids == ids
    tries = sum(list(submit.prompt_token_ids) == [POISON] for group in groups for submit in group.submits)
    assert tries == (2 if failure_notice else 3)


async def test_streams_that_had_come_far_go_first(start_router: StartRouter) -> None:
    """After a crash its suspects run one after the other: those that had been answered before the one that had not, so
    that they are answered again before it ends the next group."""
    group = FakeGroup(hold_after=3, failure_notice=CRASH, poison=POISON)
    _, ids = await undisturbed(start_router, ask())
    router = await start_router(group)
    streams = [Stream(router, ask()) for _ in range(5)]
    for stream in streams:
        while len(stream.ids[0]) < 3:
            await stream.read()
    asking = asyncio.ensure_future(router.generation.Generate(poisonous()))
    await group.until(lambda: len(group.submits) == 7)  # of those that were six one is back, and stands still
    group.go()
    assert "2 groups in a row" in await refusal(asking)
    again = [list(submit.prompt_token_ids) == [POISON] for submit in group.submits[6:12]]
    assert again == [False] * 5 + [True]
    for stream in streams:
        await stream.finish()
        assert stream.ids == ids


async def test_a_suspect_that_comes_back_into_the_line_is_one_still(start_router: StartRouter) -> None:
    """A full group refuses what another one's end has made suspect: sent from the line, it is as suspect as before."""
    group, full = FakeGroup("a", hold_after=0), FakeGroup("b", refuse=(8, "full"))
    router = await start_router(group, full)
    _, ids = await undisturbed(start_router, ask())
    stream = Stream(router, ask())
    await group.until(lambda: len(group.submits) == 1)
    group.crash(CRASH)
    await group.until(lambda: len(group.submits) == 2)
    assert full.submits
    link = router.server.groups.find_connection("a")
    assert link is not None and link.submissions.suspicion == 2
    group.go()
    await stream.finish()
    assert stream.ids == ids


async def test_who_leaves_as_its_turn_comes_holds_nobody_up(start_router: StartRouter) -> None:
    """Of suspects that wait for a group the first is cancelled just as there is a place: the next one gets it."""
    group = FakeGroup(hold_after=0)
    dispatcher = (await start_router(group)).server.dispatcher

    def place(delivered: int) -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=20, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, {0: [9] * delivered}, suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=60.0))

    there = await place(0)
    waits, first = place(1), place(2)
    await group.until(lambda: len(group.submits) == 1)  # by then both wait
    assert not waits.done() and not first.done()
    there.close(finished=False)
    first.cancel()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        (await waits).close(finished=False)
    assert first.cancelled()


async def test_suspects_of_one_kind_of_group_do_not_hold_up_those_of_another(start_router: StartRouter) -> None:
    """Groups that differ in their KV elements alone have turns of their own: who waits for one of them leaves the other
    to those that had begun there."""
    one = FakeGroup("a", hold_after=0)
    model = GetModelResponse()
    model.CopyFrom(one.model)
    model.kv_dtype = "int8"
    other = FakeGroup("b", hold_after=0, model=model)
    dispatcher = (await start_router(one, other)).server.dispatcher

    def place(like: GetModelResponse) -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=20, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, only_compatible_with=like, suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=60.0))

    there = await place(one.model)
    waits = place(one.model)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        elsewhere = await place(model)
    assert elsewhere.group == "b" and not waits.done()
    there.close(finished=False)
    assert (await waits).group == "a"


async def test_a_suspect_that_fits_no_group_holds_nobody_up(start_router: StartRouter) -> None:
    """A suspect that is too large for every group that serves waits for one; a smaller one goes on meanwhile."""
    small = FakeGroup("a", hold_after=0, num_blocks=8)
    dispatcher = (await start_router(small)).server.dispatcher

    def place(max_tokens: int, wait_seconds: float) -> "asyncio.Task[Submission]":
        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=7))
        attempt = Attempt(request, LIFECYCLE, 1, {0: [9]}, only_compatible_with=small.model, suspicion=2)
        return asyncio.create_task(dispatcher.send(attempt, wait_seconds=wait_seconds))

    there = await place(20, 10.0)
    large, next_one = place(100, 0.05), place(20, 10.0)
    there.close(finished=False)
    assert (await next_one).group == "a"
    with pytest.raises(Unavailable, match="none that could go on with it is serving"):
        await large


async def test_who_had_not_begun_has_no_part_in_it(start_router: StartRouter) -> None:
    """A group that ends names the requests that only waited there: those are no suspects, and run together at once."""
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
