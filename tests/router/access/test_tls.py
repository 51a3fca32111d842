"""TLS over gRPC and HTTP: unknown or expired certificates are refused, and changed files are read again."""

import asyncio
import http.client
import resource
import ssl
from asyncio import to_thread
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from coatcheck.router.access import file_watcher
from coatcheck.router.access.key_file import certificate_names
from coatcheck.router.access.server_certificate import ServerCertificate
from coatcheck.router.config import RouterConfig
from coatcheck.router.http.acceptor import Acceptor
from coatcheck.router.http.http_server import HttpServer
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.certificates import Leaf, TestAuthority
from tests.router.fake_group import FakeGroup


class TlsRouter:
    """A router with TLS, in front of one group."""

    def __init__(self, server: Router, grpc_address: str) -> None:
        self.server = server
        self.grpc = grpc_address

    async def model(self, ca: Path, own: Leaf | None = None) -> str:
        """The model's name by gRPC, or the name of the error's status."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(self.grpc, _credentials(ca, own), options=options) as channel:
            try:
                return (await GenerationStub(channel).GetModel(pb.GetModelRequest(), timeout=MAX_WAIT_SECONDS)).name  # type: ignore[no-any-return]
            except grpc.aio.AioRpcError as error:
                return error.code().name

    async def health(self, ca: Path, own: Leaf | None = None, path: str = "/health") -> int:
        """The status of /health by HTTP; raises OSError if the handshake fails."""
        return await to_thread(self._health, ca, own, path)

    def _health(self, ca: Path, own: Leaf | None, path: str) -> int:
        context = ssl.create_default_context(cafile=str(ca))
        if own:
            context.load_cert_chain(own.cert, own.key)
        connection = http.client.HTTPSConnection(self.server.http_address, timeout=MAX_WAIT_SECONDS, context=context)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()


def _credentials(ca: Path, own: Leaf | None) -> grpc.ChannelCredentials:
    pair = (own.key.read_bytes(), own.cert.read_bytes()) if own else (None, None)
    return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    """The authority of servers and clients."""
    return TestAuthority(tmp_path / "tls")


@pytest.fixture
async def opened(tokenizer: TokenizerJson) -> AsyncIterator[object]:
    """Starts routers with a certificate."""
    ends = []

    async def open_with(leaf: Leaf, client_ca: Path | None = None, key_file: str | None = None) -> TlsRouter:
        files = dict(tls_cert=str(leaf.cert), tls_key=str(leaf.key), tls_client_ca=client_ca and str(client_ca))
        files["key_file"] = key_file
        group = FakeGroup()
        router = Router(RouterConfig(model="tiny", http_port=0, **files), tokenizer)  # type: ignore[arg-type]  # by name
        ends.extend([router.stop, group.kill])
        address = await router.start()
        await router.set_groups([await group.start()])
        while not router.groups.serving():
            await router.groups.next_change.wait()
        return TlsRouter(router, address)

    yield open_with
    for end in ends:
        await end()


async def test_clients_check_the_server(opened, authority, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Clients that trust the authority connect to both ports; clients that trust another, or speak plain text, do
    not."""
    router = await opened(authority.leaf("server"))
    assert (await router.model(authority.ca), await router.health(authority.ca)) == ("tiny", 200)
    stranger = TestAuthority(tmp_path / "stranger")
    assert await router.model(stranger.ca) == "UNAVAILABLE"
    with pytest.raises(ssl.SSLCertVerificationError):
        await router.health(stranger.ca)
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await GenerationStub(channel).GetModel(pb.GetModelRequest(), timeout=MAX_WAIT_SECONDS)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_server_checks_clients(opened, authority, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """With an authority of clients, a client with no, a foreign or an expired certificate is refused."""
    router = await opened(authority.leaf("server"), authority.ca)
    known = authority.leaf("client")
    assert (await router.model(authority.ca, known), await router.health(authority.ca, known)) == ("tiny", 200)
    for wrong in (None, TestAuthority(tmp_path / "stranger").leaf("client"), authority.leaf("expired", days=-1)):
        assert await router.model(authority.ca, wrong) == "UNAVAILABLE"
        with pytest.raises(OSError):  # TLS 1.3 tells a client only as it reads: an alert, or a connection that is shut
            await router.health(authority.ca, wrong)


async def test_a_certificate_is_a_tenant_s(opened, authority, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A certificate's common name, or another of its names, selects the tenant over both protocols; an unknown one is
    refused."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "tenants: [{name: a, certificates: ['cn:search']}, {name: b, role: monitor, certificates: ['cn:eyes']}]"
    )
    router = await opened(authority.leaf("server"), authority.ca, str(keys))
    found = {}
    for name in ("search", "eyes", "other"):
        leaf = authority.leaf(name)
        paths = [await router.health(authority.ca, leaf, path) for path in ("/v1/models", "/metrics")]
        found[name] = (await router.model(authority.ca, leaf), *paths)
    assert found == {
        "search": ("tiny", 200, 403),
        "eyes": ("PERMISSION_DENIED", 403, 200),
        "other": ("UNAUTHENTICATED", 401, 401),
    }
    assert certificate_names(authority.leaf("search").cert.read_bytes()) == ("dns:localhost", "cn:search")
    assert certificate_names(b"no certificate") == ()


async def test_nobody_is_waited_for_to_speak_tls(authority: TestAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes that never complete are ended, and count as connections meanwhile. Beyond the limit new connections
    are refused, until handshakes have ended."""
    leaf, refused = authority.leaf("server"), list[str]()
    certificate = ServerCertificate.load(str(leaf.cert), str(leaf.key), None)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("hello")(scope, receive, send)

    monkeypatch.setattr(Acceptor, "handshake_seconds", 1.0)
    monkeypatch.setattr(Acceptor, "share", 10 / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    server = HttpServer(app, certificate, on_refused=refused.append)
    host, _, port = (await server.start("127.0.0.1", 0)).rpartition(":")
    context = ssl.create_default_context(cafile=str(authority.ca))
    silent = []
    try:
        for _ in range(10):
            silent.append(await asyncio.open_connection(host, int(port)))
        with pytest.raises(OSError):
            await asyncio.open_connection(host, int(port), ssl=context)
        assert set(refused) == {"connections"}
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            for reader, _ in silent:
                assert await reader.read() == b""  # each is ended
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"hello")
    finally:
        for _, writer in silent:
            writer.close()
        await server.stop(0)


async def test_an_expired_server_is_not_believed(opened, authority) -> None:  # type: ignore[no-untyped-def]
    """Clients of both protocols refuse it, and the error of HTTP's says why."""
    router = await opened(authority.leaf("server", days=-1))
    assert await router.model(authority.ca) == "UNAVAILABLE"
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        await router.health(authority.ca)


async def test_a_new_certificate_needs_no_restart(opened, authority, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Once the files change, new connections get the new certificate; wrong ones change nothing."""
    monkeypatch.setattr(file_watcher, "_CHECK_SECONDS", 0.0)
    leaf = authority.leaf("server")
    router = await opened(leaf)
    successor = TestAuthority(tmp_path / "successor")
    new = successor.leaf("server")
    leaf.cert.write_bytes(new.cert.read_bytes())
    leaf.key.write_bytes(new.key.read_bytes())
    assert (await router.model(successor.ca), await router.health(successor.ca)) == ("tiny", 200)
    leaf.key.write_bytes(b"no key")
    assert (await router.model(successor.ca), await router.health(successor.ca)) == ("tiny", 200)


def test_files_that_cannot_be_used(authority: TestAuthority, tmp_path: Path) -> None:
    """Each is refused at the start by its name, and none asks for a passphrase."""
    leaf, other = authority.leaf("server"), authority.leaf("other")
    cases = [
        (str(tmp_path / "none.pem"), str(leaf.key), None, r"none\.pem: No such file"),
        (str(leaf.cert), str(other.key), None, "are not a certificate and its key"),
        (str(leaf.key), str(leaf.key), None, "are not a certificate and its key"),
        (str(leaf.cert), str(leaf.key), str(leaf.key), "has no certificates in PEM"),
    ]
    for cert, key, client_ca, said in cases:
        with pytest.raises(InvalidConfig, match=said):
            ServerCertificate.load(cert, key, client_ca)


@pytest.mark.parametrize("files", [{"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}])
def test_half_of_a_certificate_is_refused(files: dict[str, str]) -> None:
    """A certificate needs its key, and an authority of clients needs a certificate."""
    with pytest.raises(InvalidConfig, match="tls_"):
        RouterConfig(model="tiny", **files)  # type: ignore[arg-type]  # by name
