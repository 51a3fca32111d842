"""Prompt log-probabilities: parts in order, each delivered once, from any number of groups."""

import asyncio
from functools import partial

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream


async def test_a_prompts_logprobs_come_as_they_are_computed(start_router: StartRouter) -> None:
    """Each part is an event of its own, in order and before the first token; Generate joins them."""
    group = FakeGroup(chunk=3, hold_after=0)
    router = await start_router(group)
    request = GenerateRequest(
        token_ids=TokenIds(ids=range(5, 13)), sampling=SamplingParams(max_tokens=2, prompt_logprobs=0)
    )
    stream = Stream(router, request)
    assert (await stream.read()).HasField("started")
    parts = [[token.token_id for token in (await stream.read()).prompt_logprobs.tokens] for _ in range(3)]
    assert parts == [[6, 7, 8], [9, 10, 11], [12]]
    group.go()
    await stream.finish()
    assert len(stream.ids[0]) == 2
    whole = await router.generation.Generate(request)
    assert [token.token_id for token in whole.prompt_logprobs.tokens] == [*range(6, 13)]
    assert len(whole.choices[0].token_ids) == 2


async def test_parts_of_a_prompts_logprobs_are_not_repeated(start_router: StartRouter) -> None:
    """A group dies while it computes the prompt: the parts of the next group continue after the delivered ones."""
    groups = {name: FakeGroup(name, chunk=3, score_at_most=6) for name in ("a", "b")}
    router = await start_router(*groups.values())
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=0)
    stream = Stream(router, GenerateRequest(token_ids=TokenIds(ids=range(5, 21)), sampling=sampling))
    first = groups.pop((await stream.read()).started.group)
    (second,) = groups.values()
    second.chunk, second.score_at_most = 4, None
    scored: list[list[int]] = []
    while len(scored) < 2:
        scored.append([token.token_id for token in (await stream.read()).prompt_logprobs.tokens])
    await first.kill()
    await stream.finish()
    assert len(stream.ids[0]) == 4
    parts = [event.prompt_logprobs for event in stream.events if event.HasField("prompt_logprobs")]
    assert [[token.token_id for token in part.tokens] for part in parts] == [
        [6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17], [18, 19, 20],
    ]  # fmt: skip


async def test_repeated_parts_do_not_count_as_an_answer(start_router: StartRouter) -> None:
    """A request that loses groups at the same place of its prompt is refused as poison: parts that the client has are
    no answer."""
    groups = {name: FakeGroup(name, chunk=3, score_at_most=6) for name in ("a", "b")}
    router = await start_router(*groups.values())
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=0)
    stream = Stream(router, GenerateRequest(token_ids=TokenIds(ids=range(5, 21)), sampling=sampling))
    first = groups.pop((await stream.read()).started.group)
    (second,) = groups.values()
    await stream.read()
    await stream.read()
    await first.kill()
    for times in (1, 2):  # the second time it is the only suspect
        await second.until(partial(_has_submitted, second, times))
        second.hang_up()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.finish()
    assert refused.value.code() is grpc.StatusCode.ABORTED


def _has_submitted(group: FakeGroup, times: int) -> bool:
    return len(group.submits) == times
