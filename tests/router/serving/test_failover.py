"""A group that is lost mid-stream: the client sees one stream, nothing lost and nothing repeated."""

import asyncio
from dataclasses import replace
from functools import partial

import grpc
import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, StatusRequest
from coatcheck.proto.stubs.worker_pb2 import FromGroup
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed

_OTHER_WEIGHTS = GetModelResponse(
    name="tiny", max_model_len=256, vocab_size=600, block_size=4, dtype="float32", kv_dtype="float32",
    fingerprint="other weights",
)  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"stop": ["zq"]}, {"n": 3}, {"logprobs": 0}], ids=str)
async def test_a_stream_moves_without_a_gap(start_router: StartRouter, sampling: dict[str, object]) -> None:
    """The group dies after some tokens: the other one gets prompt, seed and delivered ids, and the stream goes on."""
    request = ask(**sampling)
    n = request.sampling.n or 1
    texts, ids = await undisturbed(start_router, request)
    groups = {name: FakeGroup(name, hold_after=6) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = Stream(router, request, n)
    first = groups.pop((await stream.read()).started.group)
    while any(len(delivered) < 6 for delivered in stream.ids):
        await stream.read()
    (second,) = groups.values()
    second.go()
    await first.kill()
    final = await stream.finish()
    assert (stream.texts, stream.ids) == (texts, ids)
    assert (final.final.moves, final.final.group) == (1, second.name)
    assert sum(event.HasField("started") for event in stream.events) == 1
    (again,) = second.submits
    assert again.sampling.seed == 7 and list(again.prompt_token_ids) == list(first.submits[0].prompt_token_ids)
    assert {part.choice: list(part.token_ids) for part in again.resume} == {i: ids[i][:6] for i in range(n)}


async def test_a_choice_that_is_over_does_not_start_again(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """A choice that its stop string had ended is aborted at once on the next group."""
    words = tokenizer.encode("the quick brown fox jumps over")
    script = lambda submit, choice, position: words[position] if choice == 0 and position < len(words) else 300  # noqa: E731
    groups = {name: FakeGroup(name, hold_after=15, token=script) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = Stream(router, ask(n=2, stop=["brown"]), 2)
    first = groups.pop((await stream.read()).started.group)
    while len(stream.ids[1]) < 15:
        await stream.read()
    (second,) = groups.values()
    second.go()
    await first.kill()
    final = await stream.finish()
    assert stream.texts[0] == "the quick "
    assert len(stream.ids[1]) == 20
    assert [(abort.id, abort.choice) for abort in second.aborts] == [(second.submits[0].id, 0)]
    assert final.final.usage.completion_tokens == len(stream.ids[0]) + 20


async def test_a_request_waits_for_the_group_to_come_back(start_router: StartRouter) -> None:
    """With no other group, an accepted request waits; a new one is refused."""
    _, ids = await undisturbed(start_router, ask())
    group = FakeGroup(hold_after=6)
    router = await start_router(group)
    stream = Stream(router, ask())
    while len(stream.ids[0]) < 6:
        await stream.read()
    await group.kill()
    await router.wait_for_groups(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(ask())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    group.hold_after = None
    await group.start()
    await stream.finish()
    assert stream.ids == ids


async def test_waiting_has_an_end(start_router: StartRouter) -> None:
    """When no group comes in time, the stream ends with UNAVAILABLE."""
    group = FakeGroup(hold_after=1)
    router = await start_router(group, move_wait_seconds=0.05)
    stream = Stream(router, ask())
    await stream.read()
    await group.kill()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.finish()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_of_any_age_waits_for_a_full_group(start_router: StartRouter) -> None:
    """A stream that has run for longer than `move_wait_seconds`, and finds the next group full, still waits."""
    _, ids = await undisturbed(start_router, ask())
    first, second = FakeGroup("a", hold_after=3), FakeGroup("b", refuse=(8, "full"))
    router = await start_router(first, move_wait_seconds=0.0)
    stream = Stream(router, ask())
    while len(stream.ids[0]) < 3:
        await stream.read()
    address = router.server.groups.find_connection("a").endpoint  # type: ignore[union-attr]  # it is attached
    router.groups.append(second)
    await router.server.set_groups([address, await second.start()])
    await router.wait_for_groups(2)
    await first.kill()
    reading = asyncio.ensure_future(stream.finish())
    while not len(router.server.dispatcher.queue) and not reading.done():
        await router.admin.Status(StatusRequest())
    second.refuse = None
    second.report(waiting=0)
    assert (await reading).final.group == "b"
    assert stream.ids == ids


async def test_two_groups_killed_at_once_cost_no_request(start_router: StartRouter) -> None:
    """Requests that lose two groups before their first token continue when one group is back."""
    groups = [FakeGroup(name, hold_after=0) for name in ("a", "b")]
    router = await start_router(*groups)
    _, ids = await undisturbed(start_router, ask())
    streams = [Stream(router, ask()) for _ in range(6)]
    for stream in streams:
        await stream.read()
    first, second = groups
    submitted = len(streams)
    await first.kill()
    await second.until(lambda: len(second.submits) == submitted)
    await second.kill()
    first.go()
    await first.start()
    for stream in streams:
        await stream.finish()
        assert stream.ids == ids


async def test_losses_with_tokens_in_between_are_not_poison(start_router: StartRouter) -> None:
    """A stream that gets tokens from each group may lose any number of groups: only losses in a row count."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=3) for name in "abcdef"}
    router = await start_router(*groups.values())
    stream = Stream(router, ask())
    name = (await stream.read()).started.group
    for delivered in (3, 6, 9, 12, 15):
        while len(stream.ids[0]) < delivered:
            await stream.read()
        lost = groups.pop(name)
        for group in groups.values():
            group.hold_after = delivered + 3
        await lost.kill()
        while len(stream.ids[0]) < delivered + 3:
            await stream.read()
        (name,) = [group.name for group in groups.values() if group.submits]
    groups[name].go()
    assert (await stream.finish()).final.moves == 5
    assert stream.ids == ids


async def test_drained_groups_are_no_sign_of_poison(start_router: StartRouter) -> None:
    """A request without output survives any number of groups that are drained and then removed."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=0) for name in "abcde"}
    router = await start_router(*groups.values())
    stream = Stream(router, ask())
    name = (await stream.read()).started.group
    while len(groups) > 1:
        there = {connection.name: connection.endpoint for connection in router.server.groups.connections}
        await router.server.set_groups(
            [replace(there[name], state="draining"), *(there[g] for g in groups if g != name)]
        )
        del groups[name]
        await router.server.set_groups([there[name] for name in groups])
        (name,) = await _holding(groups)
    groups[name].go()
    assert (await stream.finish()).final.moves == 4
    assert stream.ids == ids


async def test_removed_groups_are_no_sign_of_poison(start_router: StartRouter) -> None:
    """A request without output survives any number of groups that are removed at once, as by a drain of 0 seconds."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=0) for name in "abcde"}
    router = await start_router(*groups.values())
    endpoints = {connection.name: connection.endpoint for connection in router.server.groups.connections}
    stream = Stream(router, ask())
    name = (await stream.read()).started.group
    while len(groups) > 1:
        del groups[name]
        await router.server.set_groups([endpoints[name] for name in groups])
        (name,) = await _holding(groups)
    groups[name].go()
    assert (await stream.finish()).final.moves == 4
    assert stream.ids == ids


async def _holding(groups: dict[str, FakeGroup]) -> list[str]:
    """The groups that have received the request; waits for the first."""
    tasks = [asyncio.ensure_future(group.until(partial(_has_submits, group))) for group in groups.values()]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    return [name for name, group in groups.items() if group.submits]


async def test_streams_move_only_among_equals(start_router: StartRouter) -> None:
    """A group with other weights does not continue a stream."""
    first, second = FakeGroup("a", hold_after=3), FakeGroup("b", model=_OTHER_WEIGHTS)
    router = await start_router(first, move_wait_seconds=0.05)
    stream = Stream(router, ask())
    while len(stream.ids[0]) < 3:
        await stream.read()
    address = router.server.groups.find_connection("a").endpoint  # type: ignore[union-attr]  # it is attached
    router.groups.append(second)
    await router.server.set_groups([address, await second.start()])
    await router.wait_for_groups(2)
    await first.kill()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.finish()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not second.submits


@pytest.mark.parametrize("sampling", [{}, {"prompt_logprobs": 0}], ids=["no output", "log-probabilities of the prompt"])
async def test_a_request_without_output_moves_to_any_group(
    start_router: StartRouter, sampling: dict[str, object]
) -> None:
    """A group with other weights runs a request whose client has no output of it. Log-probabilities are output."""
    other = FakeGroup("b", model=_OTHER_WEIGHTS)
    first = FakeGroup("a", hold_after=0, chunk=2)
    router = await start_router(first, move_wait_seconds=0.05)
    stream = Stream(router, ask(**sampling))
    while (event := await stream.read()).HasField("started") and sampling:
        pass
    address = router.server.groups.find_connection("a").endpoint  # type: ignore[union-attr]  # it is attached
    router.groups.append(other)
    await router.server.set_groups([address, await other.start()])
    await router.wait_for_groups(2)
    await first.kill()
    if sampling:
        assert event.HasField("prompt_logprobs")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.finish()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and not other.submits
    else:
        final = (await stream.finish()).final
        assert (final.group, final.moves, len(stream.ids[0])) == ("b", 1, 20)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_choice_ends_with_the_end_token_of_the_group_that_computed_it(
    start_router: StartRouter, tokenizer: TokenizerJson, n: int
) -> None:
    """A request without output moves to a group with another end-of-sequence token: this token ends its choices, and is
    not text. A group of the first kind would show it."""
    words = tokenizer.encode("the quick brown fox")
    model = GetModelResponse()
    model.CopyFrom(_OTHER_WEIGHTS)
    model.eos_token_ids.append(words[-1])
    first = FakeGroup("a", hold_after=0)
    other = FakeGroup("b", model=model, token=lambda submit, choice, position: words[position])
    router = await start_router(first)
    stream = Stream(router, ask(n=n), n)
    await stream.read()
    router.groups.append(other)
    connection = router.server.groups.find_connection("a")
    assert connection is not None
    await router.server.set_groups([connection.endpoint, await other.start()])
    await router.wait_for_groups(2)
    await first.kill()
    await stream.finish()
    assert stream.ids == [words] * n
    assert [text.strip() for text in stream.texts] == ["the quick brown"] * n


async def test_a_request_without_output_waits_for_a_group_that_is_large_enough(start_router: StartRouter) -> None:
    """A request that some group has accepted is not refused for its length while only smaller groups serve."""
    large, small = FakeGroup("a", hold_after=0), FakeGroup("b", num_blocks=2)
    _, ids = await undisturbed(start_router, ask())
    router = await start_router(large, small)
    stream = Stream(router, ask())
    assert (await stream.read()).started.group == "a"
    await large.kill()
    await router.wait_for_groups(1)
    large.hold_after = None
    await large.start()
    assert (await stream.finish()).final.group == "a"
    assert stream.ids == ids and not small.submits


async def test_a_group_that_is_too_small_is_not_moved_to(start_router: StartRouter) -> None:
    """A running stream is not refused for its size: it waits for a group that can hold it."""
    large, small = FakeGroup("a", hold_after=3), FakeGroup("b", num_blocks=2)
    _, ids = await undisturbed(start_router, ask())
    router = await start_router(large, small)
    stream = Stream(router, ask())
    while len(stream.ids[0]) < 3:
        await stream.read()
    await large.kill()
    await router.wait_for_groups(1)
    large.hold_after = None
    await large.start()
    assert (await stream.finish()).final.group == "a"
    assert stream.ids == ids and not small.submits


async def test_a_silent_group_is_lost(start_router: StartRouter) -> None:
    """A group that keeps its connection and sends nothing counts as lost, and its streams move."""
    groups = {name: FakeGroup(name, hold_after=3) for name in ("a", "b")}
    router = await start_router(*groups.values(), silence_seconds=1.0, hang_seconds=1.5)
    stream = Stream(router, ask())
    first = groups.pop((await stream.read()).started.group)
    (second,) = groups.values()
    second.go()
    first.silent = True
    beating = asyncio.create_task(_beat(second))
    final = await stream.finish()
    beating.cancel()
    assert final.final.group == second.name
    status = await router.admin.Status(StatusRequest())
    (lost,) = [group for group in status.groups if group.name == first.name]
    assert lost.state == "lost" and "sent nothing" in lost.reason


async def _beat(group: FakeGroup) -> None:
    while True:
        group.send(FromGroup(load=group.load))
        await asyncio.sleep(0.2)


async def test_streams_of_a_group_reported_lost_move_at_once(start_router: StartRouter) -> None:
    """When the supervisor reports a group as lost, its streams move before the connection breaks."""
    groups = {name: FakeGroup(name, hold_after=3) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = Stream(router, ask())
    first = groups.pop((await stream.read()).started.group)
    (second,) = groups.values()
    second.go()
    addresses = [connection.endpoint for connection in router.server.groups.connections]
    lost = [replace(a, state="lost", reason="rank 1 died") if a.name == first.name else a for a in addresses]
    await router.server.set_groups(lost)
    final = await stream.finish()
    assert final.final.group == second.name
    status = await router.admin.Status(StatusRequest())
    assert {group.name: (group.state, group.reason) for group in status.groups} == {
        first.name: ("lost", "rank 1 died"),
        second.name: ("serving", ""),
    }


async def test_status_has_the_reason_of_the_last_restart(start_router: StartRouter) -> None:
    """A group that serves again after a failure shows in its status why it was restarted."""
    router = await start_router(FakeGroup("a"))
    (connection,) = router.server.groups.connections
    await router.server.set_groups([replace(connection.endpoint, restarts=1, last_failure="rank 0 has ended: SIGKILL")])
    (group,) = (await router.admin.Status(StatusRequest())).groups
    assert (group.state, group.restarts) == ("serving", 1)
    assert group.reason == "serves again; last restart: rank 0 has ended: SIGKILL"


def _has_submits(group: FakeGroup) -> bool:
    return bool(group.submits)
