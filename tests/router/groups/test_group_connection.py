"""GroupConnection: which registrations are accepted, what ejects a group, and how a connection closes."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, FromGroup, KvEvent, Refused, SequenceOutput, StepBatch
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups import group_connection
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import GroupFailures
from coatcheck.router.groups.group_stream import GroupStream
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.routing.prefix_index import PrefixIndex
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed


@pytest.mark.parametrize(("name", "model", "reason"), [
    ("stranger", "tiny", "is group 'stranger', not 'g0'"),
    ("g0", "other", "the group serves model 'other', not 'tiny'"),
])  # fmt: skip
async def test_another_group_at_the_address_does_not_serve(
    start_router: StartRouter, name: str, model: str, reason: str
) -> None:
    """A registration with another group's name or another model is refused, and the status has the reason."""
    group = FakeGroup(name)
    group.model.name = model
    router = await start_router()
    router.groups.append(group)
    await router.server.set_groups([replace(await group.start(), name="g0")])
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while (status := (await router.admin.Status(StatusRequest())).groups[0]).state == "starting":
            pass  # it has not registered yet
    assert status.state == "lost" and reason in status.reason
    assert not router.server.groups.serving()


async def test_a_group_without_a_block_size_does_not_serve(start_router: StartRouter) -> None:
    """Block hashes depend on the block size."""
    group = FakeGroup()
    group.model.block_size = 0
    router = await start_router()
    router.groups.append(group)
    await router.server.set_groups([await group.start()])
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while (status := (await router.admin.Status(StatusRequest())).groups[0]).state == "starting":
            pass  # it has not registered yet
    assert status.state == "lost" and status.reason == "the group registered without a block size"


async def test_a_group_that_reports_more_blocks_than_it_registered_is_ejected(start_router: StartRouter) -> None:
    """Such reports are impossible, and would fill the router's memory."""
    group = FakeGroup(num_blocks=64)
    router = await start_router(group)
    events = [KvEvent(stored=True, block_hash=bytes([n]) * 16, tier=TIER_DEVICE) for n in range(65)]
    group.send_events(*events)
    await router.wait_for_groups(0)
    (status,) = (await router.admin.Status(StatusRequest())).groups
    assert (status.state, status.reason) == ("lost", "the group reports more cached blocks than it has")


async def test_a_group_with_another_block_size_does_not_serve_beside_the_first(start_router: StartRouter) -> None:
    """Block hashes of all groups must agree: the second group is refused with both sizes in the reason, and the first
    one serves."""
    first, second = FakeGroup("g0"), FakeGroup("g1")
    second.model.block_size = 8
    router = await start_router(first)
    router.groups.append(second)
    await router.server.set_groups([router.server.groups.find_connection("g0").endpoint, await second.start()])  # type: ignore[union-attr]
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while (status := (await router.admin.Status(StatusRequest())).groups[1]).state == "starting":
            pass  # it has not registered yet
    assert status.state == "lost" and "blocks hold 8 tokens, those of the groups beside it 4" in status.reason
    assert [connection.name for connection in router.server.groups.serving()] == ["g0"]


async def test_an_ejected_group_that_serves_again_keeps_the_reason(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that was ejected and has attached again serves. Its status has the last reason, and /metrics counts the
    ejection."""
    monkeypatch.setattr(group_connection, "_LONGEST_BACKOFF", 0.05)
    group = FakeGroup(hold_after=1)
    router = await start_router(group, attached=True)
    stream = Stream(router, ask(max_tokens=2))
    await stream.read()
    await group.until(lambda: bool(group.submits))
    group.send(FromGroup(batch=StepBatch(outputs=[SequenceOutput(id=group.submits[0].id, choice=5, token_ids=[5])])))
    await router.wait_for_groups(0)
    group.go()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await router.wait_for_groups(1)
    (status,) = (await router.admin.Status(StatusRequest())).groups
    assert (status.state, status.reason) == (
        "serving", "serves again; ejections: 1, the last for: the group sent output of choice 5; the request's n is 1"
    )  # fmt: skip
    assert 'coatcheck_group_ejections_total{group="g0"} 1.0' in router.server.metrics.render().decode()
    await stream.finish()


def connection_to(
    address: GroupEndpoint,
    changed: asyncio.Event,
    judge: Callable[[GroupConnection], None] = lambda connection: None,
    **settings: float,
) -> GroupConnection:
    """A GroupConnection without a router. `judge`: its `detect_outlier`."""
    config = RouterConfig("tiny", **settings)  # type: ignore[arg-type]  # by name
    return GroupConnection(
        address,
        config,
        PrefixIndex(),
        LoadTable(),
        GroupFailures(),
        on_change=changed.set,
        on_room=lambda: None,
        detect_outlier=judge,
    )


async def test_a_stream_that_cannot_be_read_is_not_tried_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of the router itself would be raised again at once: the connection pauses as for a group that sends
    impossible messages."""

    def fail(connection: GroupConnection) -> None:
        raise ZeroDivisionError("a defect")

    group, changed = FakeGroup(), asyncio.Event()
    connection = connection_to(await group.start(), changed, fail)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not connection.ejections:
            await changed.wait()
            changed.clear()
    await asyncio.sleep(0)
    assert not connection.is_attached and connection.detach_reason == "its stream could not be read: a defect"
    assert "group g0 is ejected: its stream could not be read: a defect" in caplog.text
    await connection.close("taken away")
    await group.kill()


async def test_a_connection_that_is_closed_when_it_finds_silence_ends() -> None:
    """`close` wins over silence that is found at the same moment: the connection does not attach again."""
    group = FakeGroup()
    address = await group.start()
    registered = asyncio.Event()
    connection = connection_to(address, registered, silence_seconds=1.0, hang_seconds=1.0)
    await registered.wait()
    (watch,) = [task for task in asyncio.all_tasks() if task.get_name() == "watch over g0"]
    await asyncio.wait([watch])
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await connection.close("taken away")
    assert not connection.is_attached and connection.detach_reason == "taken away"
    await group.kill()


@pytest.mark.parametrize("error", [None, RuntimeError("gRPC's own error")])
async def test_a_connection_ends_although_grpc_swallows_the_cancellation(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """gRPC may swallow the cancellation by `close`, and end the stream without an error or with one of its own. The
    connection does not attach again, and `close` returns."""
    begun = asyncio.Event()

    async def read(self: GroupStream, receive: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None

    monkeypatch.setattr(GroupStream, "read", read)
    connection = connection_to(GroupEndpoint("g0", "127.0.0.1:1"), asyncio.Event())
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await begun.wait()
        await connection.close("taken away")
    assert not connection.is_attached


async def test_a_silent_group_whose_host_accepts_connections_is_kept() -> None:
    """A group that is silent while its host still accepts connections, as one that is suspended, stays attached until
    `hang_seconds`."""
    group, registered = FakeGroup(), asyncio.Event()
    connection = connection_to(await group.start(), registered, silence_seconds=1.0, hang_seconds=600.0)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await registered.wait()
    await asyncio.sleep(3)
    assert connection.is_attached and not connection.ejections
    await connection.close("the test ends")
    await group.kill()


async def test_a_silent_group_whose_host_is_gone_is_lost() -> None:
    """A group that is silent and whose host accepts no connection is lost, though its stream is not broken."""
    group, registered = FakeGroup(), asyncio.Event()
    host, _, port = (await group.start()).address.rpartition(":")
    tasks, writers = list[asyncio.Task[None]](), list[asyncio.StreamWriter]()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_group, to_group = await asyncio.open_connection(host, int(port))
        writers.extend((writer, to_group))
        tasks.extend(asyncio.create_task(copy) for copy in (_copy(reader, to_group), _copy(from_group, writer)))

    listener = await asyncio.start_server(forward, "127.0.0.1", 0)
    address = GroupEndpoint(group.name, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    connection = connection_to(address, registered, silence_seconds=1.0, hang_seconds=600.0)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await registered.wait()
        registered.clear()
        listener.close()  # and not the connection that it has accepted
        await registered.wait()
    assert not connection.is_attached and "accepts no connection" in connection.last_ejection
    await connection.close("the test ends")
    await group.kill()
    for writer in writers:
        writer.close()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("has_two_addresses", [False, True])
async def test_a_host_that_refuses_a_connection_accepts_none(
    monkeypatch: pytest.MonkeyPatch, has_two_addresses: bool
) -> None:
    """Also if the host's name has several addresses, and each refuses."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    find = socket.getaddrinfo

    def find_all(_: object, *more: Any, **named: Any) -> list[Any]:
        return [found for n in range(1, 2 + has_two_addresses) for found in find(f"127.0.0.{n}", *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", find_all)
    stream = GroupStream(GroupEndpoint("g0", f"two.example:{port}"), None, silence_seconds=1.0, hang_seconds=1.0)
    assert await stream._accepts_connection()
    listener.close()
    assert not await stream._accepts_connection()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)


async def test_outputs_of_another_attempt_are_dropped(start_router: StartRouter) -> None:
    """Outputs of another attempt or of an unknown submission change nothing."""
    group = FakeGroup(hold_after=2)
    router = await start_router(group)
    stream = Stream(router, ask(max_tokens=4))
    await stream.read()
    await group.until(lambda: bool(group.submits))
    id = group.submits[0].id
    stale = [SequenceOutput(id=id, attempt=9, token_ids=[5]), SequenceOutput(id=id + 100, token_ids=[5])]
    group.send(FromGroup(batch=StepBatch(outputs=stale)))
    group.go()
    await stream.finish()
    assert stream.ids == [[group.token(group.submits[0], 0, position) for position in range(4)]]


async def test_a_refusal_of_another_attempt_changes_nothing(start_router: StartRouter) -> None:
    """A refusal of another attempt does not end the running one."""
    group = FakeGroup(hold_after=2)
    router = await start_router(group)
    stream = Stream(router, ask(max_tokens=4))
    while len(stream.ids[0]) < 2:
        await stream.read()
    group.send(FromGroup(refused=Refused(id=group.submits[0].id, attempt=9, code=8, message="full")))
    group.go()
    await stream.finish()
    assert len(stream.ids[0]) == 4


async def test_a_group_that_sends_an_impossible_choice_is_ejected(start_router: StartRouter) -> None:
    """An output of a choice that does not exist ejects the group, with the reason in its status, and its streams
    continue on another group."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=3) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = Stream(router, ask())
    first = groups.pop((await stream.read()).started.group)
    (second,) = groups.values()
    second.go()
    while len(stream.ids[0]) < 3:
        await stream.read()
    garbage = SequenceOutput(id=first.submits[0].id, choice=5, token_ids=[5])
    first.send(FromGroup(batch=StepBatch(outputs=[garbage])))
    await router.wait_for_groups(1)
    (ejected,) = [group for group in (await router.admin.Status(StatusRequest())).groups if group.name == first.name]
    assert (ejected.state, ejected.reason) == ("lost", "the group sent output of choice 5; the request's n is 1")
    assert (await stream.finish()).final.group == second.name
    assert stream.ids == ids


async def test_closing_submissions_of_a_broken_stream_keeps_those_of_the_next(start_router: StartRouter) -> None:
    """The stream to a group breaks and attaches again to the same process before the clients read that their
    submissions have failed. When these clients disconnect, nothing fails, and the expected blocks of the new stream's
    submissions stay."""
    group = FakeGroup(hold_after=0)
    message = GenerateRequest(token_ids=TokenIds(ids=range(2, 15)), sampling=SamplingParams(max_tokens=2, seed=1))
    router = await start_router(group)
    index, generation = router.server.groups.index, router.server.generation
    old = [generation.generate_stream(message) for _ in range(2)]
    for stream in old:
        assert (await anext(stream)).HasField("started")
    expected = len(index.expected_blocks)
    assert expected
    group.hang_up()
    async with asyncio.timeout(10):
        await router.wait_for_groups(0)
        assert len(index.expected_blocks) == 0
        await router.wait_for_groups(1)
    await old[0].aclose()  # nothing is expected yet
    new = generation.generate_stream(message)
    assert (await anext(new)).HasField("started")
    await old[1].aclose()
    assert len(index.expected_blocks) == expected
    await new.aclose()
    assert len(index.expected_blocks) == 0
    index.check()
