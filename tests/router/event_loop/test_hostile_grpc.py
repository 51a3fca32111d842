"""Clients of the gRPC port that do not keep to the protocol, or use it to make work: others are served meanwhile."""

import asyncio
import gzip
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.config import MAX_STREAMS, MESSAGE_BYTES
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.grpc_handlers import GENERATION_SERVICE, GrpcHandlers
from coatcheck.router.serving.embed_service import EmbedService
from tests.router.event_loop.http2_frames import (
    CONTINUATION,
    DATA,
    ENDS_HEAD,
    ENDS_STREAM,
    HEADERS,
    MAX_CONCURRENT_STREAMS,
    OPENING,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_frames,
    frame,
    head,
    prefixed,
    read_frame,
)
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

_REQUEST = pb.GenerateRequest(text="a fox", sampling=pb.SamplingParams(max_tokens=3))
_MESSAGE = _REQUEST.SerializeToString()
_CANCEL = struct.pack(">I", 8)
_FIELD_BYTES = 4000


@asynccontextmanager
async def connected(router: RouterUnderTest) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has sent HTTP/2's opening."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        writer.write(OPENING)
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            yield reader, writer
    finally:
        writer.transport.abort()


async def check_served(router: RouterUnderTest) -> None:
    """Another client gets its stream, and then no submission is left over."""
    events = [event async for event in router.generation.GenerateStream(_REQUEST)]
    assert events[-1].WhichOneof("event") == "final"
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await router.server.traffic.wait_until_idle()
    assert all(not len(connection.submissions) for connection in router.server.groups.connections)


def _table_bomb(count: int) -> bytes:
    """Calls whose heads are 12,000 bytes, each of which stands for a field of 4,000 bytes in HPACK's table."""
    value = b"\x7f\xa1\x1e" + b"b" * _FIELD_BYTES  # 0x7f 0xa1 0x1e: 4,000
    fields = [b"\x40\x03x-b" + value, *[b""] * (count - 1)]
    heads = [head() + one + b"\xbe" * 12_000 for one in fields]
    frames = [frame(CONTINUATION, ENDS_HEAD, 2 * n + 1, part[8000:]) for n, part in enumerate(heads)]
    return b"".join(frame(HEADERS, 0, 2 * n + 1, one[:8000]) + frames[n] for n, one in enumerate(heads))


async def test_a_connection_has_a_limit_of_streams(start_router: StartRouter) -> None:
    """The server announces the limit. Streams beyond it are reset, while those within it and other clients are
    served."""
    group = FakeGroup()
    router = await start_router(group)
    async with connected(router) as (reader, writer):
        settings = dict[int, int]()
        while MAX_CONCURRENT_STREAMS not in settings:
            kind, _, _, payload = await read_frame(reader)
            settings |= dict(struct.iter_unpack(">HI", payload)) if kind == SETTINGS else {}
        assert settings[MAX_CONCURRENT_STREAMS] == MAX_STREAMS
        numbers = [2 * n + 1 for n in range(2 * MAX_STREAMS)]
        writer.write(b"".join(frame(HEADERS, ENDS_HEAD, number, head()) for number in numbers))
        reset = set[int]()
        while len(reset) < MAX_STREAMS:
            kind, _, stream, _ = await read_frame(reader)
            reset |= {stream} if kind == RST_STREAM else set()
        assert reset == set(numbers[MAX_STREAMS:])
        await check_served(router)
        writer.write(frame(DATA, ENDS_STREAM, numbers[0], prefixed(_MESSAGE)))
        while (await read_frame(reader))[:3] != (HEADERS, ENDS_STREAM | ENDS_HEAD, numbers[0]):
            pass
    await check_served(router)


ATTACKS: dict[str, bytes] = {
    "calls that are reset at once": b"".join(
        call_frames(n, _MESSAGE) + frame(RST_STREAM, 0, n, _CANCEL) for n in range(1, 4001, 2)
    ),
    "heads that unfold": _table_bomb(20),
    "settings": frame(SETTINGS, 0, 0, b"") * 10_000,
    "pings": frame(PING, 0, 0, bytes(8)) * 10_000,
    "a head without end": frame(HEADERS, 0, 1, head()) + frame(CONTINUATION, 0, 1, head({"x-a": "a" * 15_000})) * 200,
    "a head of a megabyte": frame(HEADERS, 0, 1, head())
    + frame(CONTINUATION, 0, 1, head({"x-a": "a" * 15_000})) * 64
    + frame(CONTINUATION, ENDS_HEAD, 1, b""),
    "empty frames of a head": frame(HEADERS, 0, 1, head()) + frame(CONTINUATION, 0, 1, b"") * 10_000,
    "empty data": frame(HEADERS, ENDS_HEAD, 1, head()) + frame(DATA, 0, 1, b"") * 10_000,
    "a frame of 16 MiB": frame(HEADERS, ENDS_HEAD, 1, head()) + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(1 << 16),
    "no HTTP/2": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 100,
    "no UTF-8": call_frames(1, _MESSAGE, {"x-a": b"\xff\xfe", "authorization": b"\xff"}),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_one_connection_does_not_stop_others(start_router: StartRouter, attack: str) -> None:
    """While the router reads it, and after, another client is served, and no submission is left over."""
    router = await start_router(FakeGroup())
    async with connected(router) as (_, writer):
        writer.write(ATTACKS[attack])
        served = asyncio.create_task(check_served(router))
        # The router may close the connection, or read no more of it.
        drained = asyncio.create_task(writer.drain())
        await served
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
    await check_served(router)


@pytest.mark.parametrize("length", [MESSAGE_BYTES + 1, 2**32 - 1])
async def test_a_message_that_says_it_is_too_long_is_refused_at_once(start_router: StartRouter, length: int) -> None:
    """The status comes after the prefix; the rest of the message is not waited for."""
    router = await start_router(FakeGroup())
    async with connected(router) as (reader, writer):
        prefix = prefixed(b"abc", length=length)
        writer.write(frame(HEADERS, ENDS_HEAD, 1, head()) + frame(DATA, 0, 1, prefix))
        while (await read_frame(reader))[0] != HEADERS:
            pass
    await check_served(router)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_has_the_same_limit(
    start_router: StartRouter, compression: grpc.Compression
) -> None:
    """A compressed message is read. One that would unfold beyond the limit is refused and reaches no group."""
    group = FakeGroup()
    router = await start_router(group)
    await router.generation.Generate(_REQUEST, compression=compression)
    assert len(group.submits) == 1
    bomb = pb.GenerateRequest(text=" " * (MESSAGE_BYTES + 1))
    assert len(gzip.compress(bomb.SerializeToString())) < MESSAGE_BYTES >> 8
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(bomb, compression=compression)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert str(MESSAGE_BYTES) in (refused.value.details() or "")
    assert len(group.submits) == 1
    await check_served(router)


class _ClosedContext:
    """The context of a call whose client has gone, before gRPC has cancelled the call's task."""

    def invocation_metadata(self) -> None:
        return None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def time_remaining(self) -> None:
        return None

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


class _Collector:
    """Stands for the gRPC server, to which GrpcHandlers adds its methods."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler[bytes, bytes]] = []

    def add_generic_rpc_handlers(self, handlers: "tuple[grpc.GenericRpcHandler[bytes, bytes], ...]") -> None:
        self.handlers += handlers


async def test_a_client_that_goes_before_a_write_is_no_incident(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    """The call is cancelled, and nothing is logged as an error."""
    router = await start_router(FakeGroup())
    generation, side, collector = router.server.generation, SideProcesses(), _Collector()
    handlers = GrpcHandlers(
        generation, EmbedService(generation, None), router.server.admin, Authenticator(None), side, 30.0
    )
    handlers.add_to(collector)  # type: ignore[arg-type]  # all that it calls
    details = type("Details", (), {"method": f"/{GENERATION_SERVICE}/GenerateStream", "invocation_metadata": ()})
    handler: Any = collector.handlers[0].service(details)  # type: ignore[arg-type]  # as gRPC's

    async def messages() -> AsyncIterator[bytes]:
        yield _MESSAGE

    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(messages(), _ClosedContext())
    assert not caplog.records
    side.close()
    await check_served(router)


async def test_a_burst_of_calls_gets_the_router_s_own_statuses(start_router: StartRouter) -> None:
    """2,560 calls arrive while the event loop runs something else. Each is served. gRPC's default cancels some."""
    router = await start_router(FakeGroup())
    count, table = 5, frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 0))  # the server then encodes each field plainly
    method = {":path": f"/{GENERATION_SERVICE}/GetModel"}
    window = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))
    calls = b"".join(call_frames(2 * n + 1, b"", method) for n in range(MAX_STREAMS))
    connections = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(count)]
    try:
        for _, writer in connections:
            # asyncio writes to the socket at once, so that the loop does not run meanwhile.
            writer.write(OPENING + table + window + calls)
        statuses = list[bytes]()
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            for reader, _ in connections:
                ended = 0
                while ended < MAX_STREAMS:
                    kind, flags, _, payload = await read_frame(reader)
                    ended += kind == RST_STREAM or (kind == HEADERS and bool(flags & ENDS_STREAM))
                    if kind == HEADERS and flags & ENDS_STREAM:
                        statuses.append(payload.partition(b"grpc-status")[2].partition(b"\0")[0][1:])
    finally:
        for _, writer in connections:
            writer.transport.abort()
    assert len(statuses) == count * MAX_STREAMS and set(statuses) == {b"0"}
    await check_served(router)
