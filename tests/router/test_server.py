"""The server around the service: health, reflection, drain, status, ports and limits."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs.coatcheck_pb2 import DrainRequest, GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import GroupListUpdate, GroupListVersion
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter


def ask() -> GenerateRequest:
    """A short request."""
    return GenerateRequest(text="a fox", sampling=SamplingParams(max_tokens=5, seed=1))


async def health(router: RouterUnderTest, expected: int) -> None:
    """Follows the health service until it reports `expected`."""
    watch = HealthStub(router.channel).Watch(HealthCheckRequest())
    async for response in watch:
        if response.status == expected:
            break
    watch.cancel()


async def test_health_follows_the_groups(start_router: StartRouter) -> None:
    """SERVING only while a group is attached, for the whole server and for the service by name."""
    group = FakeGroup()
    router = await start_router()
    await health(router, HealthCheckResponse.NOT_SERVING)
    await router.server.set_groups([await group.start()])
    router.groups.append(group)
    await health(router, HealthCheckResponse.SERVING)
    named = await HealthStub(router.channel).Check(HealthCheckRequest(service="coatcheck.v1.Generation"))
    assert named.status == HealthCheckResponse.SERVING
    await group.kill()
    await health(router, HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(start_router: StartRouter, version: str) -> None:
    """Both versions of reflection list the services for clients without our .proto files."""
    router = await start_router()
    call: Any = router.channel.stream_stream(  # type: ignore[call-arg]  # grpc-stubs have no streams of grpc.aio
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )()
    await call.write(ServerReflectionRequest(list_services=""))
    response = await call.read()
    names = {service.name for service in response.list_services_response.service}
    assert {"coatcheck.v1.Generation", "coatcheck.v1.Admin", "grpc.health.v1.Health"} <= names
    await call.write(ServerReflectionRequest(file_containing_symbol="coatcheck.v1.Generation"))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


async def test_a_taken_port_is_a_clear_error(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """A router whose port another one uses fails to start."""
    router = await start_router()
    second = Router(RouterConfig(model="tiny", port=router.port), tokenizer)
    with pytest.raises(InvalidConfig, match="which is in use"):
        await second.start()
    await second.stop()


async def test_draining_the_router_lets_streams_end(start_router: StartRouter) -> None:
    """New requests are refused, open streams continue, and the response says whether all ended in time."""
    group = FakeGroup(hold_after=2)
    router = await start_router(group)
    stream = aiter(router.generation.GenerateStream(ask()))
    await anext(stream)
    early = await router.admin.Drain(DrainRequest(timeout_seconds=0.01))
    assert (early.drained, early.remaining_streams) == (False, 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(ask())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE and "draining" in (refused.value.details() or "")
    await health(router, HealthCheckResponse.NOT_SERVING)
    group.go()
    assert [event async for event in stream][-1].HasField("final")
    assert (await router.admin.Drain(DrainRequest(timeout_seconds=0))).drained
    assert (await router.admin.Status(StatusRequest())).state == "drained"


async def test_an_announced_drain_refuses_nothing_yet(start_router: StartRouter) -> None:
    """Health and status say "draining", so that load balancers stop, and requests that come all the same are answered.
    `drain --undo` ends it."""
    router = await start_router(FakeGroup("a"))
    router.server.announce_drain()
    await health(router, HealthCheckResponse.NOT_SERVING)
    assert (await router.admin.Status(StatusRequest())).state == "draining"
    assert (await router.generation.Generate(ask())).final.group == "a"
    await router.admin.Drain(DrainRequest(undo=True))
    await health(router, HealthCheckResponse.SERVING)


async def test_a_supervisor_undoes_its_drain(start_router: StartRouter) -> None:
    """`undo_drain` ends an announced drain and one that waits for requests, as the next supervisor needs if one dies
    while it restarts the router."""
    group = FakeGroup("a", hold_after=2)
    router = await start_router(group)
    stream = aiter(router.generation.GenerateStream(ask()))
    await anext(stream)
    router.server.announce_drain()
    waiting = asyncio.ensure_future(router.server.drain(MAX_WAIT_SECONDS))
    await health(router, HealthCheckResponse.NOT_SERVING)
    router.server.undo_drain()
    await health(router, HealthCheckResponse.SERVING)
    assert not await asyncio.wait_for(waiting, MAX_WAIT_SECONDS)
    group.go()
    assert [event async for event in stream][-1].HasField("final")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_that_ends_without_its_message_leaves_no_error_in_the_log(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The client gives up before it has sent its message. Its status cannot be sent any more, and the log has no
    traceback of it."""
    router = await start_router(FakeGroup("a"))

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    name = f"/coatcheck.v1.Generation/{method}"
    for _ in range(10):
        call = router.channel.stream_stream(name, bytes, bytes)(never(), timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as given_up:
            await call.read()
        assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await router.generation.Generate(ask())).final.group == "a"
    assert not [record for record in caplog.records if record.name.startswith("grpc") and record.levelname == "ERROR"]


async def test_draining_is_undone(start_router: StartRouter) -> None:
    """Undoing a drain of the router or of a group ends the call that waits for the drain, and new requests are accepted
    again."""
    group = FakeGroup("a", hold_after=2)
    router = await start_router(group)
    stream = aiter(router.generation.GenerateStream(ask()))
    await anext(stream)
    for name in ("", "a"):
        waiting = asyncio.ensure_future(router.admin.Drain(DrainRequest(group=name)))
        await health(router, HealthCheckResponse.NOT_SERVING)
        undone = await router.admin.Drain(DrainRequest(group=name, undo=True))
        assert (undone.drained, undone.remaining_streams) == (False, 1)
        assert not (await asyncio.wait_for(waiting, MAX_WAIT_SECONDS)).drained
        assert (await router.admin.Status(StatusRequest())).state == "serving"
    group.go()
    assert [event async for event in stream][-1].HasField("final")
    assert (await router.generation.Generate(ask())).final.group == "a"


async def test_a_drained_group_stays_so_when_it_is_started_again(start_router: StartRouter) -> None:
    """A drain survives the group's process, ends with an undo, and is forgotten with the group."""
    router = await start_router(FakeGroup("a"))
    link = next(iter(router.server.groups.connections))
    assert (await router.admin.Drain(DrainRequest(group="a"))).drained
    await router.server.set_groups([GroupEndpoint("a", "", "lost", "it was killed")])
    assert not router.server.groups.find_connection("a")
    await router.server.set_groups([link.endpoint])
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not next(iter(router.server.groups.connections)).is_attached:
            await router.server.groups.next_change.wait()
    status = await router.admin.Status(StatusRequest())
    assert (status.state, status.groups[0].state) == ("unavailable", "drained")
    assert not (await router.admin.Drain(DrainRequest(group="a", undo=True))).drained
    assert (await router.admin.Status(StatusRequest())).state == "serving"
    await router.admin.Drain(DrainRequest(group="a"))
    await router.server.set_groups([])
    assert not router.server.groups.draining


async def test_draining_a_group_sends_new_work_elsewhere(start_router: StartRouter) -> None:
    """A draining group finishes its requests and gets no new ones."""
    groups = {name: FakeGroup(name, hold_after=2) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = aiter(router.generation.GenerateStream(ask()))
    name = (await anext(stream)).started.group
    assert not (await router.admin.Drain(DrainRequest(group=name, timeout_seconds=0.01))).drained
    (other,) = set(groups) - {name}
    for group in groups.values():
        group.go()
    assert {(await router.generation.Generate(ask())).final.group for _ in range(6)} == {other}
    assert [event async for event in stream][-1].final.group == name
    assert (await router.admin.Drain(DrainRequest(group=name))).drained
    states = {group.name: group.state for group in (await router.admin.Status(StatusRequest())).groups}
    assert states == {name: "drained", other: "serving"}


@pytest.mark.parametrize(("request_", "code"), [
    (DrainRequest(group="nobody"), grpc.StatusCode.NOT_FOUND),
    (DrainRequest(timeout_seconds=-1.0), grpc.StatusCode.INVALID_ARGUMENT),
    (DrainRequest(timeout_seconds=float("nan")), grpc.StatusCode.INVALID_ARGUMENT),
    (DrainRequest(timeout_seconds=1.0, undo=True), grpc.StatusCode.INVALID_ARGUMENT),
])  # fmt: skip
async def test_bad_drains_are_refused(start_router: StartRouter, request_: DrainRequest, code: grpc.StatusCode) -> None:
    """An unknown group and an invalid timeout are refused, and nothing is drained."""
    router = await start_router(FakeGroup())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.admin.Drain(request_)
    assert refused.value.code() is code
    assert (await router.admin.Status(StatusRequest())).state == "serving"


async def test_status_tells_what_groups_report(start_router: StartRouter) -> None:
    """The status has the supervisor's state and the reported load of each group, latencies, and the hit ratio."""
    group = FakeGroup(finds=4)
    group.load.status.blocks_used = 3
    group.load.status.ranks.add(rank=0, pid=42)
    router = await start_router(group)
    await router.generation.Generate(ask())
    absent = GroupEndpoint("g1", "", "starting", "loading weights", restarts=2)
    await router.server.set_groups([*(link.endpoint for link in router.server.groups.connections), absent])
    status = await router.admin.Status(StatusRequest())
    assert (status.router, status.state, status.model.name) == ("router-0", "serving", "tiny")
    assert (status.ttft.count, status.tpot.count) == (1, 1) and status.ttft.p99_seconds > 0
    assert 0 < status.hit_ratio <= 1
    serving, starting = status.groups
    assert (serving.name, serving.state, serving.blocks_used, serving.blocks_total) == ("g0", "serving", 3, 64)
    assert serving.prefill_tokens_per_second == 1000.0
    assert (starting.state, starting.reason, starting.restarts) == ("starting", "loading weights", 2)
    assert serving.ranks[0].pid == 42


async def test_an_older_list_of_groups_is_ignored(start_router: StartRouter) -> None:
    """Of the supervisor's lists that arrive out of order the newest counts, also of another supervisor's. The answer is
    the version that the router holds. A list without a version counts."""
    router = await start_router()

    async def known(name: str, epoch: int, number: int) -> tuple[list[str], GroupListVersion]:
        version = GroupListVersion(epoch, number)
        update = GroupListUpdate(version, (GroupEndpoint(name, "", "starting"),))
        held = await router.server.update_groups(update)
        return [group.name for group in (await router.admin.Status(StatusRequest())).groups], held

    assert await known("second", 1, 2) == (["second"], GroupListVersion(1, 2))
    assert await known("first", 1, 1) == (["second"], GroupListVersion(1, 2))
    assert await known("second again", 1, 2) == (["second"], GroupListVersion(1, 2))
    assert await known("of the next supervisor", 2, 1) == (["of the next supervisor"], GroupListVersion(2, 1))
    assert await known("third", 1, 3) == (["of the next supervisor"], GroupListVersion(2, 1))
    await router.server.set_groups([GroupEndpoint("unversioned", "", "starting")])
    assert [group.name for group in (await router.admin.Status(StatusRequest())).groups] == ["unversioned"]


async def test_a_prompt_of_a_million_tokens_gets_through_to_its_refusal(start_router: StartRouter) -> None:
    """gRPC's own limit of 4 MiB does not stand in the way of a long prompt, whose ids take three bytes each."""
    router = await start_router(FakeGroup())
    request = GenerateRequest(token_ids=TokenIds(ids=[70_000] * 1_500_000))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the prompt has 1500000" in (refused.value.details() or "")


@pytest.mark.parametrize(("setting", "value"), [
    ("model", ""), ("port", 70000), ("port", -1), ("silence_seconds", 0.0), ("hang_seconds", 3.0),
    ("admission_wait_seconds", float("nan")), ("move_wait_seconds", -1.0), ("tokenizer_threads", 0),
])  # fmt: skip
def test_a_bad_setting_is_refused_by_name(setting: str, value: object) -> None:
    """Creating an invalid RouterConfig raises an error with the setting's name."""
    with pytest.raises(InvalidConfig, match=setting):
        RouterConfig(**{"model": "tiny", setting: value})  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_router_listens_at_ipv6_addresses(tokenizer: TokenizerJson, host: str) -> None:
    """With brackets or without, gRPC and HTTP answer at the address that the router returns."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    router = Router(RouterConfig(model="m", host=host, http_host=host, http_port=0), tokenizer)
    address = await router.start()
    try:
        assert address.startswith("[::1]:") and router.http_address.startswith("[::1]:")
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), MAX_WAIT_SECONDS)
        reader, writer = await asyncio.open_connection("::1", int(router.http_address.rpartition(":")[2]))
        writer.write(b"GET /ping HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), MAX_WAIT_SECONDS)).startswith(b"HTTP/1.1 ")
        writer.close()
    finally:
        await router.stop()
