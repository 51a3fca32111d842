"""Clients that hold connections, send without end, do not speak HTTP, or come under another host's name."""

import asyncio
import json
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelRequest
from coatcheck.router.access.connection_limits import share_of_limit
from coatcheck.router.http.http_protocol import HEAD_BYTES, BoundedHttpProtocol
from coatcheck.router.http.http_server import HttpServer
from coatcheck.router.http.middleware import BodyLimitMiddleware, is_local_host
from coatcheck.router.telemetry.request_metrics import REASONS, RequestMetrics
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter


async def _echo(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # as ASGI has it
    request = Request(scope, receive)
    if request.url.path == "/later":  # after the server has seen that the client sends no more
        await asyncio.sleep(0.2)
    await Response(request.method.encode() + b" " + await request.body())(scope, receive, send)


class Speak(Protocol):
    def __call__(self, data: bytes, ends: bool = False) -> Awaitable[bytes]: ...


@pytest.fixture
def counts() -> CollectorRegistry:
    """The registry of the server's metrics."""
    return CollectorRegistry()


@pytest.fixture
async def speak(counts: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Speak]:
    """Sends bytes to a server that echoes bodies, and if `ends` is set an end after them; returns all bytes until the
    server closes the connection."""
    metrics = RequestMetrics(counts)
    monkeypatch.setattr(BoundedHttpProtocol, "head_seconds", 0.2)
    server = HttpServer(BodyLimitMiddleware(_echo, metrics, 1 << 20, 0.2), on_refused=metrics.record_refusal)
    host, _, port = (await server.start("127.0.0.1", 0)).rpartition(":")

    async def spoken(data: bytes, ends: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                writer.write(data)
                if ends:
                    writer.write_eof()
                return await reader.read()
        except ConnectionResetError:
            return b""  # it hung up with more to read, as it may
        finally:
            writer.close()

    yield spoken
    await server.stop(0)


@pytest.mark.parametrize(
    ("sent", "answered", "counted"),
    [
        (b"", b"", None),
        (b"\r\n", b"HTTP/1.1 408 ", "slow_head"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx-slow: ", b"HTTP/1.1 408 ", "slow_head"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc", b"HTTP/1.1 408 ", "slow_body"),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-encoding: gzip\r\n\r\nabc",
            b"HTTP/1.1 415 ",
            "compressed_body",
        ),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nx-slow: ", b"HTTP/1.1 200 ", "slow_head"),
        (b"\x16\x03\x01\x02\x00\x01", b"HTTP/1.1 400 ", "not_http"),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
            b"HTTP/1.1 400 ",
            "not_http",
        ),
    ],
    ids=["nothing", "an empty line", "half a head", "half a body", "gzip", "half a second head", "TLS", "no chunk"],
)
async def test_nobody_is_waited_for_without_end(
    speak: Speak, counts: CollectorRegistry, sent: bytes, answered: bytes, counted: str | None
) -> None:
    """A request that is not complete in time may get an error; the server closes the connection and counts the
    reason."""
    said = await speak(sent)
    assert said.startswith(answered) and bool(said) == bool(answered)
    refused = {reason: counts.get_sample_value("coatcheck_refusals_total", {"reason": reason}) for reason in REASONS}
    assert [reason for reason, count in refused.items() if count] == ([counted] if counted else [])


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        ("chunked", 200), ("Chunked", 200), (", chunked", 200), ("gzip, chunked", 501), ("GZip , chunked", 501),
        ("gzip\r\ntransfer-encoding: chunked", 501), ("x, chunked", 501), ("identity, chunked", 501), ("gzip", 400),
        ("chunked, gzip", 400), ("chunked, chunked", 400),
    ],
)  # fmt: skip
async def test_a_body_is_never_read_with_a_transfer_coding_left_on_it(
    speak: Speak, counts: CollectorRegistry, codings: str, status: int
) -> None:
    """A transfer coding below the chunks is refused with 501, as RFC 9112 has it, and one above them with 400."""
    body = b"3\r\nabc\r\n0\r\n\r\n"
    said = await speak(
        f"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: {codings}\r\n\r\n".encode() + body
    )
    assert said.startswith(b"HTTP/1.1 %d " % status) and said.endswith(b"POST abc") == (status == 200)
    if status == 501:
        assert b"; send the body uncompressed" in said
        assert counts.get_sample_value("coatcheck_refusals_total", {"reason": "compressed_body"}) == 1


@pytest.mark.parametrize(("head", "status"), [("content-length: 99999999", 413), ("content-encoding: gzip", 415)])
async def test_a_client_that_asks_first_is_not_told_to_send_a_body_that_is_refused(
    speak: Speak, head: str, status: int
) -> None:
    """curl sends `Expect: 100-continue` with a long body, and waits. The refusal comes at once, and nothing is sent."""
    told = await speak(f"POST / HTTP/1.1\r\nhost: localhost\r\n{head}\r\nexpect: 100-continue\r\n\r\n".encode())
    assert told.startswith(f"HTTP/1.1 {status} ".encode())


async def test_a_head_has_a_length(speak: Speak, counts: CollectorRegistry) -> None:
    """A head without end is refused and not kept."""
    said = await speak(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x-a: " + b"a" * (2 * HEAD_BYTES))
    assert said.startswith(b"HTTP/1.1 431 ") or not said
    assert counts.get_sample_value("coatcheck_refusals_total", {"reason": "long_head"}) == 1


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"POST /later HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello", [b"POST hello"]),
        (b"POST /later HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello", [b"POST hello"]),
        (2 * b"POST /later HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi", [b"POST hi", b"POST hi"]),
        (b"GET /later HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\n", [b"GET "]),
        (b"GET /later HTTP/1.1\r\nhost: a\r\n\r\nPOST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nhi", [b"GET "]),
        (b"POST /later HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhel", []),
        (b"GET / HTTP/1.1\r\n", []),
    ],
    ids=["1.1", "1.0", "two requests", "half a second head", "half a second body", "half a body", "half a head"],
)
async def test_a_client_that_sends_no_more_gets_its_answers(speak: Speak, sent: bytes, answers: list[bytes]) -> None:
    """A client that ends its half of the connection, as with `nc -N`, gets the answer to each complete request."""
    said = await speak(sent, ends=True)
    assert [part.partition(b"\r\n\r\n")[2] for part in said.split(b"HTTP/1.1 200 OK")[1:]] == answers
    assert said.startswith(b"HTTP/1.1 200 OK\r\n") == bool(answers)


_GET_LATER = b"GET /later HTTP/1.1\r\nhost: a\r\n\r\n"
_NO_CHUNK = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n"


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (_GET_LATER + b"\x16\x03\x01\x02\x00\x01", [200, 400]),
        (_GET_LATER + b"GET / HTTP/1.1\r\nno header\r\n\r\n", [200, 400]),
        (2 * _GET_LATER + b"nonsense\r\n\r\n", [200, 200, 400]),
        (_GET_LATER + _NO_CHUNK, [200, 400]),
        (2 * _GET_LATER + _NO_CHUNK, [200, 200, 400]),
        (_GET_LATER + b"GET / HTTP/1.1\r\nx-a: " + b"a" * (2 * HEAD_BYTES), [200, 431]),
    ],
    ids=["TLS", "no header", "two before", "no chunk", "two before no chunk", "long head"],
)
async def test_what_cannot_be_read_does_not_lose_the_answers_before_it(
    speak: Speak, sent: bytes, statuses: list[int], ends: bool
) -> None:
    """Requests before one that cannot be read are answered. Then the refusal comes, and the connection ends."""
    said = await speak(sent, ends)
    assert [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]] == statuses
    assert said.count(b"GET ") == said.count(b" 200 ")  # each response has its body


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("ends_first", [False, True])
async def test_the_request_of_a_client_that_has_gone_is_aborted(
    start_http_router: StartHttpRouter, is_streamed: bool, ends_first: bool
) -> None:
    """A client that closes its connection, at once or after it has ended its half, gets no more tokens computed,
    whether or not its response has begun."""
    group = FakeGroup(hold_after=0)
    router = await start_http_router(group)
    _, writer = await asyncio.open_connection(*router.http_address.split(":"))
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9, "stream": is_streamed}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await group.until(lambda: bool(group.submits))
        if ends_first:
            writer.write_eof()
        writer.close()
        await group.until(lambda: bool(group.aborts))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("comes_later", [False, True])
@pytest.mark.parametrize("resets", [False, True])
async def test_the_first_request_of_a_client_that_has_gone_is_aborted(
    start_http_router: StartHttpRouter, is_streamed: bool, comes_later: bool, resets: bool
) -> None:
    """A client that sends a second request behind the first, and goes away by an end or a reset, gets no more tokens of
    the first computed. The second never begins."""
    group = FakeGroup(hold_after=0)
    router = await start_http_router(group)
    _, writer = await asyncio.open_connection(*router.http_address.split(":"))
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9, "stream": is_streamed}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    one = head + b"content-length: %d\r\n\r\n" % len(body) + body
    writer.write(one if comes_later else 2 * one)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await group.until(lambda: bool(group.submits))
        if comes_later:
            writer.write(one)
        if resets:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await group.until(lambda: bool(group.aborts))
    assert len(group.submits) == 1


@pytest.mark.parametrize("more", [b"", b"keep-alive, "])
async def test_a_request_that_would_rather_be_http2_keeps_its_body(speak: Speak, more: bytes) -> None:
    """A request that offers an upgrade to HTTP/2, as Java's client sends it, is served as HTTP/1.1, and so is the next
    on its connection."""
    one = (b"POST / HTTP/1.1\r\nhost: a\r\nconnection: " + more + b"Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
           b"http2-settings: AAMAAABkAAQAAP__\r\ncontent-length: 5\r\n\r\nhello")  # fmt: skip
    said = await speak(one + b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert said.count(b"HTTP/1.1 200 ") == 2 and b"POST hello" in said


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("", True), ("localhost:8000", True), ("127.0.0.1", True), ("[::1]:8000", True), ("[::1]", True),
        ("192.168.1.7:80", True), ("a.localhost", True), ("host.docker.internal:8000", True), ("localhost.", True),
        ("evil.example", False), ("evil.example:8000", False), ("localhost.evil.example", False), ("a", False),
        ("127.0.0.1.evil.example", False), (":", True),
    ],
)  # fmt: skip
def test_whose_name_it_is(host: str, is_local: bool) -> None:
    """Addresses, and names that cannot be registered in the public DNS, are local."""
    assert is_local_host(host) is is_local


async def test_another_s_name_is_refused(start_http_router: StartHttpRouter) -> None:
    """A router without keys refuses a Host header with a foreign name, as in DNS rebinding; with --insecure it accepts
    any."""
    router, open_to_all = await start_http_router(FakeGroup()), await start_http_router(FakeGroup("g1"), insecure=True)
    for path in ("/", "/v1/models", "/metrics", "/health"):
        status, _, text = await router.request("GET", path, None, {"host": "evil.example"})
        assert status == 403 and "'evil.example'" in json.loads(text)["error"]["message"]
        assert (await open_to_all.request("GET", path, None, {"host": "evil.example"}))[0] == 200
    _, _, metrics = await router.request("GET", "/metrics")
    assert 'coatcheck_refusals_total{reason="foreign_host"} 4.0' in metrics


async def test_every_answer_has_its_request_s_id(start_http_router: StartHttpRouter) -> None:
    """Refusals have the id too, also those before the body is read."""
    router = await start_http_router(FakeGroup())
    for method, path, headers in (
        ("POST", "/v1/completions", {}),
        ("GET", "/nowhere", {}),
        ("GET", "/v1/completions", {}),
        ("GET", "/", {"host": "evil.example"}),
        ("GET", "/ping", {}),
        ("GET", "/version", {}),
    ):
        _, answered, _ = await router.request(method, path, None, {"x-request-id": "mine", **headers})
        assert answered["x-request-id"] == "mine", path


async def test_several_hosts_are_refused(start_http_router: StartHttpRouter) -> None:
    """A request with two Host headers is refused, whichever comes first."""
    router = await start_http_router(FakeGroup())
    host, _, port = router.http_address.rpartition(":")
    for names in (b"localhost", b"evil.example"), (b"evil.example", b"localhost"):
        reader, writer = await asyncio.open_connection(host, int(port))
        hosts = b"".join(b"host: " + name + b"\r\n" for name in names)
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n")
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            said = await reader.read()
        writer.close()
        assert said.startswith(b"HTTP/1.1 400 ") and b"several Host headers" in said


def test_no_limit_is_no_share_of_nothing() -> None:
    """Where the system sets no limit of files, connections have one all the same, and it is not zero."""
    assert share_of_limit(1024, 0.5) == 512
    assert share_of_limit(resource.RLIM_INFINITY, 0.5) == share_of_limit(1 << 40, 0.5) == 1 << 19


CROWD = """
import select, socket, sys
greeting = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9) if sys.argv[2] == "grpc" else b"GET / HTTP/1.1\\r\\n"
greeting = greeting.replace(bytes(9), bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(220)]
for one in crowd:
    try: one.sendall(greeting)
    except OSError: pass
turned_away, least, settled = 0, int(sys.argv[3]), False
# Until as many have been turned away as must be, and a second more for those that must not.
while crowd and not settled:
    settled = turned_away >= least
    ready = select.select(crowd, [], [], 1 if settled else None)[0]
    for one in ready:
        try: said = one.recv(100)
        except OSError: said = b""
        if said == b"" or b" 503 " in said:
            turned_away += 1
            crowd.remove(one)
            settled = False
print(turned_away, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "most"), [("http", 200), ("grpc", 100)])
async def test_a_crowd_takes_a_share_of_the_files(start_http_router: StartHttpRouter, kind: str, most: int) -> None:
    """Connections beyond the share are closed, and earlier ones still work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        router = await start_http_router(FakeGroup())
        await router.generation.GetModel(GetModelRequest())
        port = router.http_address.rpartition(":")[2] if kind == "http" else str(router.port)
        pipe = asyncio.subprocess.PIPE
        crowd = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CROWD, port, kind, str(220 - most), stdin=pipe, stdout=pipe
        )
        assert crowd.stdout is not None
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                turned_away = int(await crowd.stdout.readline())
            await router.generation.GetModel(GetModelRequest())  # on a connection that was there before
        finally:
            crowd.kill()
            await crowd.communicate()
        assert 220 - most <= turned_away <= 222 - most  # the router's own clients are there too
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
