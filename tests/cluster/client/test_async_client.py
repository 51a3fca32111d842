"""Our client: a stream outlives the router that began it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client import credentials
from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.connection_errors import explain_error
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded, Unauthenticated, Unavailable
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from tests.cluster.fake_router import FakeRouter, token
from tests.router.certificates import TestAuthority

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serve(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[asyncio.Server]:
    """Answer each connection to a local port; end when the last connection has ended.

    gRPC connects again by itself, so the port may have accepted a connection for which asyncio has not called answer
    yet. Every other task of the loop must have ended when the server is left.
    """

    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                await answer(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async with await asyncio.start_server(answer_and_close, "127.0.0.1", 0, ssl=context) as server:
        yield server
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.gather(*others)


def address_of(server: asyncio.Server) -> str:
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def request(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a b c", sampling=pb.SamplingParams(**{"max_tokens": 6, **sampling}))  # type: ignore[arg-type]


async def gather(client: AsyncClient, asked: pb.GenerateRequest) -> list[pb.GenerateEvent]:
    return [event async for event in client.stream_events(asked)]


def ids(events: list[pb.GenerateEvent], choice: int = 0) -> list[int]:
    return [i for event in events if event.HasField("delta") and event.delta.choice == choice
            for i in event.delta.token_ids]  # fmt: skip


async def test_stream_comes_whole() -> None:
    """A stream is one Started, the tokens in order, one Final."""
    async with FakeRouter() as router, AsyncClient([router.address]) as client:
        events = await gather(client, request(seed=3))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * 6, "final"]
    assert ids(events) == [token(3, 0, position) for position in range(6)]


@pytest.mark.parametrize("after", range(1, 14))
@pytest.mark.parametrize("n", [1, 2])
async def test_lost_stream_goes_on_elsewhere(after: int, n: int) -> None:
    """Wherever a stream breaks, the events a caller sees are those of an undisturbed one, but for who ended it."""
    asked = request(n=n, prompt_logprobs=0)
    async with FakeRouter("group-0", losses=[after]) as first, FakeRouter("group-1") as second, FakeRouter() as calm:
        async with AsyncClient([first.address, second.address]) as client, AsyncClient([calm.address]) as undisturbed:
            events, expected = await gather(client, asked), await gather(undisturbed, asked)
    assert [event.WhichOneof("event") for event in events] == [event.WhichOneof("event") for event in expected]
    assert events[:-1] == expected[:-1]
    if second.requests:
        (again,) = second.requests
        assert again.sampling.seed == 7
        assert again.request_id == "r1"
        held = {resumed.choice: list(resumed.token_ids) for resumed in again.resume}
        assert all(ids(events, choice)[: len(known)] == known for choice, known in held.items())
        assert sum(map(len, held.values())) == max(0, min(after - 2, 6 * n))


async def test_a_slow_connection_is_waited_for() -> None:
    """The client waits for a router whose first bytes take a third of a second, over a slow network or on a busy
    host."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, ahead = await asyncio.open_connection(*router.address.split(":"))
        await asyncio.sleep(0.35)  # the line's own slowness, not a wait for something to happen
        await asyncio.gather(_copy(reader, ahead), _copy(back, writer))

    async with serve(forward) as line, FakeRouter() as router, AsyncClient([address_of(line)]) as client:
        events = await gather(client, request(seed=3))
    assert ids(events) == [token(3, 0, position) for position in range(6)]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_same_router_when_it_is_back() -> None:
    """With one address only, the client waits for that router and goes on there."""
    async with FakeRouter(losses=[3, 2, 4]) as router, AsyncClient([router.address]) as client:
        events = await gather(client, request(seed=5))
    assert ids(events) == [token(5, 0, position) for position in range(6)]
    assert len(router.requests) == 4


async def test_restarted_router_is_found_again() -> None:
    """A router that is gone and comes back on its port, a new process in all but name, ends the stream."""
    old = await FakeRouter(losses=[3]).__aenter__()
    async with AsyncClient([old.address]) as client:
        stream = client.stream_events(request(seed=5))
        events = [await anext(stream) for _ in range(3)]
        await old.__aexit__()
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        async with FakeRouter(port=int(old.address.split(":")[1])):
            events.append(await rest)
            events.extend([event async for event in stream])
    assert ids(events) == [token(5, 0, position) for position in range(6)]


async def test_retries_are_bounded() -> None:
    """A stream that breaks again and again without bringing anything new ends with UNAVAILABLE."""
    async with FakeRouter(losses=[2, *[1] * 50]) as router:
        async with AsyncClient([router.address], max_resumes=3) as client:
            with pytest.raises(Unavailable, match="lost the router after 1 token: this router is going away"):
                await gather(client, request())
    assert len(router.requests) == 1 + 3


async def test_nobody_there() -> None:
    """When no router answers, the error says which address and what to look for, at once."""
    async with AsyncClient(["127.0.0.1:1"]) as client:
        with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1; is `coatcheck serve` running"):
            await gather(client, request())


@pytest.mark.parametrize(
    ("trusted", "said"),
    [
        (None, "{} speaks HTTP, not gRPC: give the router's gRPC address"),
        ("server", "{} speaks HTTP, not gRPC: give the router's gRPC address"),
        ("stranger", "no TLS connection to {}: one side does not trust the other's certificate"),
    ],
)
async def test_each_kind_of_wrong_server_has_its_own_error(tmp_path: Path, trusted: str | None, said: str) -> None:
    """The router's HTTP address, with TLS and without, and an untrusted certificate are told apart from a server that
    is not there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    context, access = None, Credentials()
    if trusted:
        authorities = {name: TestAuthority(tmp_path, name) for name in ("server", "stranger")}
        leaf = authorities["server"].leaf("leaf")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(leaf.cert, leaf.key)
        access = Credentials.build(str(authorities[trusted].ca), None, None, None)
    async with serve(answer, context) as http:
        address = address_of(http)
        async with AsyncClient([address], access) as client:
            with pytest.raises(Unavailable, match=said.format(address)):
                await gather(client, request())


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server whose process ends as a client's first bytes arrive."""
    await reader.read(1)
    writer.transport.abort()


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that accepts the connection and never answers."""
    while await reader.read(1 << 16):
        pass


async def speak_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server without TLS: it begins with the bytes with which gRPC's server begins."""
    await reader.read(1)
    writer.write(b"\0\0\0\4\0\0\0\0\0")
    await say_nothing(reader, writer)


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (close_at_once, "{} closed the connection during the handshake: its router has just ended"),
        (say_nothing, "{} accepts the connection but does not answer"),
        (speak_plainly, "no TLS connection to {}: the server there does not speak TLS"),
        (None, "no server answers at {}"),
    ],
)
async def test_only_a_certificate_error_mentions_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Any, said: str
) -> None:
    """With TLS too, a server that ends, hangs, is gone or does not speak TLS has an error of its own, without a word
    about certificates."""
    monkeypatch.setattr(credentials, "CONNECT_SECONDS", 1.0)
    access = Credentials.build(str(TestAuthority(tmp_path, "server").ca), None, None, None)
    async with serve(behave) as server:
        address = address_of(server)
        if behave is None:
            server.close()
        async with AsyncClient([address], access) as client:
            with pytest.raises(Unavailable) as told:
                await gather(client, request())
    assert str(told.value).startswith(said.format(address)) and "certificate" not in str(told.value)


async def test_a_connection_lost_during_a_stream_has_its_own_error() -> None:
    """If a router's process ends during a stream, the error says that the connection was lost, and nothing about
    TLS."""
    cut: list[asyncio.WriteTransport] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(*router.address.split(":"))
        cut.append(writer.transport)
        await asyncio.gather(_copy(reader, forth), _copy(back, writer))

    async with serve(relay) as proxy, FakeRouter() as router:
        router.stalls_after = 2
        address = address_of(proxy)
        async with AsyncClient([address], max_resumes=0) as client:
            stream = client.stream_events(request())
            await anext(stream)
            await anext(stream)
            cut[0].abort()
            with pytest.raises(Unavailable, match=f"after 1 token: the connection to {address} was lost: its router"):
                await anext(stream)


@pytest.mark.parametrize(
    "message",
    [
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "recvmsg:Connection timed out (110)",
        "sendmsg: Broken pipe (32)",
        "Stream removed (recvmsg:Connection reset by peer)",
        "Stream removed (sendmsg: Broken pipe (32))",
        "Stream removed",
        "keepalive timeout",
        "GOAWAY received",
    ],
)
def test_each_message_of_grpc_for_a_lost_connection_has_the_same_meaning(message: str) -> None:
    """gRPC names a lost connection by the read or the write that failed first."""
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), message, message
    )
    assert str(explain_error(error, "a:1", None)) == (
        "the connection to a:1 was lost: its router has ended or is being restarted"
    )


async def test_next_address_when_the_first_is_down() -> None:
    """A dead router among several costs nothing but the attempt."""
    async with FakeRouter() as router, AsyncClient(["127.0.0.1:1", router.address]) as client:
        events = await gather(client, request())
        assert client.address == router.address
    assert len(ids(events)) == 6


async def test_each_stream_tries_every_router() -> None:
    """Several streams that find the first router down all reach the second one."""
    async with FakeRouter() as router, AsyncClient(["127.0.0.1:1", router.address]) as client:
        streams = await asyncio.gather(*(gather(client, request(seed=seed)) for seed in range(4)))
        assert client.address == router.address
    assert [len(ids(events)) for events in streams] == [6] * 4


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INTERNAL, CoatcheckError),
    ],
)
async def test_refusal_is_not_retried(code: grpc.StatusCode, kind: type[CoatcheckError]) -> None:
    """A refusal comes back as our error with the server's message, after one attempt."""
    async with FakeRouter() as router, FakeRouter() as other, AsyncClient([router.address, other.address]) as client:
        router.refusal = (code, "temperature is -1")
        with pytest.raises(kind, match="temperature is -1"):
            await gather(client, request())
    assert (len(router.requests), len(other.requests)) == (1, 0)


async def test_who_has_no_key_is_told_where_to_put_one() -> None:
    """The server speaks of a header, which a command has no other way to send."""
    async with FakeRouter() as router, AsyncClient([router.address]) as client:
        router.refusal = (grpc.StatusCode.UNAUTHENTICATED, "this server asks for a key")
        with pytest.raises(Unauthenticated, match="asks for a key; here it is taken from COATCHECK_API_KEY"):
            await gather(client, request())


async def test_begun_stream_outwaits_a_full_router() -> None:
    """A resume refused for lack of room is tried elsewhere: the stream had been promised."""
    async with FakeRouter(losses=[3]) as first, FakeRouter() as full, FakeRouter("group-2") as third:
        full.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        async with AsyncClient([first.address, full.address, third.address]) as client:
            events = await gather(client, request(seed=1))
    assert ids(events) == [token(1, 0, position) for position in range(6)]
    assert events[-1].final.group == "group-2"


class _TicketingRouter(FakeRouter):
    """Sends a resume ticket."""

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        async for event in super().GenerateStream(request, context):
            if event.HasField("started"):
                event.started.resume_ticket = b"ticket"
            yield event


class _OlderRouter(FakeRouter):
    """Refuses a resume ticket as an unknown field, in the words of `message_limits`."""

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        if request.resume_ticket:
            self.requests.append(request)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "GenerateRequest has an unknown field, number 12")
        async for event in super().GenerateStream(request, context):
            yield event


async def test_a_router_of_an_older_version_resumes_without_ticket() -> None:
    """A router that does not know resume tickets gets the resume again without one."""
    async with _TicketingRouter(losses=[3]) as first, _OlderRouter() as older:
        async with AsyncClient([first.address, older.address]) as client:
            events = await gather(client, request(seed=1))
    assert ids(events) == [token(1, 0, position) for position in range(6)]
    assert [resumed.resume_ticket for resumed in older.requests] == [b"ticket", b""]


async def test_callers_own_resume_is_kept() -> None:
    """Token ids that the caller already held are part of every later resume."""
    asked = request(seed=4)
    asked.resume.add(choice=0, token_ids=[token(4, 0, 0), token(4, 0, 1)])
    async with FakeRouter(losses=[2]) as router, AsyncClient([router.address]) as client:
        events = await gather(client, asked)
    assert ids(events) == [token(4, 0, position) for position in range(2, 6)]
    assert list(router.requests[1].resume[0].token_ids) == [token(4, 0, position) for position in range(3)]


async def test_timeout_covers_the_whole_stream() -> None:
    """A stream past its time ends with an error, not with a new attempt."""
    async with FakeRouter() as router, AsyncClient([router.address]) as client:
        router.stalls_after = 2
        await client.get_model()  # so that it is connected
        with pytest.raises(CoatcheckError, match="gave up after 1 s"):
            [event async for event in client.stream_events(request(), timeout=1.0)]
    assert len(router.requests) == 1


async def test_leaving_early_cancels() -> None:
    """A caller that stops reading ends the work at the router."""
    async with FakeRouter() as router, AsyncClient([router.address]) as client:
        router.stalls_after = 3
        stream = client.stream_events(request())
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(router.left.wait(), MAX_WAIT_SECONDS)
