"""SecureCluster: `coatcheck serve` with TLS, client certificates and keys, and connections to it."""

import contextlib
import http.client
import re
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.running_server import coatcheck
from tests.cluster.serving import Serving
from tests.router.certificates import Leaf, TestAuthority


@dataclass
class SecureCluster:
    """`keys`: a key for each tenant. `known`: a client certificate that is accepted; `bad`: certificates that are
    refused. `secrets`: texts that must not be written anywhere."""

    serving: Serving
    authority: TestAuthority
    keys: dict[str, str]
    key_file: Path
    known: Leaf
    bad: dict[str, Leaf | None]
    secrets: set[str] = field(default_factory=set)

    def context(self, leaf: Leaf | None) -> ssl.SSLContext:
        """The TLS context of a client with this certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        if leaf is not None:
            context.load_cert_chain(leaf.cert, leaf.key)
        return context

    def headers(self, tenant: str = "search", **more: str) -> dict[str, str]:
        """HTTP headers with that tenant's key."""
        return {"content-type": "application/json", "authorization": f"Bearer {self.keys[tenant]}", **more}

    def web(self, leaf: Leaf | None = None, seconds: float = MAX_WAIT_SECONDS) -> http.client.HTTPSConnection:
        """An HTTPS connection with the known certificate, or another one."""
        where = self.serving.url.removeprefix("https://")
        return http.client.HTTPSConnection(where, timeout=seconds, context=self.context(leaf or self.known))

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Send one request on a connection of its own."""
        with contextlib.closing(self.web()) as web:
            web.request(method, path, body, self.headers() if headers is None else headers)
            answer = web.getresponse()
            return answer.status, answer.read()

    def channel(self, leaf: Leaf | None, *options: tuple[str, int]) -> grpc.Channel:
        """A gRPC channel with that certificate."""
        pair = (leaf.key.read_bytes(), leaf.cert.read_bytes()) if leaf else (None, None)
        credentials = grpc.ssl_channel_credentials(self.authority.ca.read_bytes(), *pair)
        return grpc.secure_channel(self.serving.address, credentials, [("grpc.use_local_subchannel_pool", 1), *options])

    def metadata(self, tenant: str = "search") -> tuple[tuple[str, str], ...]:
        """gRPC metadata with that tenant's key."""
        return (("authorization", f"Bearer {self.keys[tenant]}"),)

    def plain(self) -> socket.socket:
        """A TCP connection without TLS."""
        host, _, port = self.serving.url.removeprefix("https://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=MAX_WAIT_SECONDS)

    def sender(self, body: bytes, *, tenant: str = "search", buffer: int = 0) -> ssl.SSLSocket:
        """A connection that has sent a streaming completion and reads nothing by itself."""
        plain = self.plain()
        if buffer:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        wrapped = self.context(self.known).wrap_socket(plain, server_hostname="127.0.0.1")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {self.keys[tenant]}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        wrapped.sendall(head.encode() + body)
        return wrapped

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, from one scrape: the sum over all labels that are not given."""
        status, page = self.ask("GET", "/metrics", headers=self.headers("eyes"))
        assert status == 200, page
        families = text_string_to_metric_families(page.decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"there is no {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def written(self) -> dict[str, str]:
        """Everything that the cluster has written or shows, by place: logs, output, arguments, state, metrics."""
        mine = self.serving.descendants()
        texts = {f"arguments of {pid}": command for pid, command in mine.items()}
        found = re.search(r"--session[-_]dir=(\S+)", " ".join(mine.values()))
        assert found
        for path in Path(found[1], "logs").rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_text(errors="replace")
        for page in ("/metrics", "/dashboard/state", "/"):
            texts[page] = self.ask("GET", page, headers=self.headers("eyes"))[1].decode()
        texts["printed"] = "".join(self.serving.lines)
        return texts


def vanish(connection: socket.socket) -> None:
    """Reset the connection: what is on its way in either direction is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def secure_cluster(model: str, folder: Path, *arguments: str) -> Iterator[SecureCluster]:
    """A running SecureCluster, on free ports."""
    authority = TestAuthority(folder)
    server, file = authority.leaf("server"), folder / "keys.yaml"
    keys = {}
    for name, role in (("search", "user"), ("ops", "admin"), ("eyes", "monitor"), ("gone", "user")):
        keys[name] = coatcheck("keys", "new", name, "--role", role, "--file", str(file)).stdout.strip()
    bad = {
        "none": None,
        "a stranger's": TestAuthority(folder / "stranger").leaf("client"),
        "expired": authority.leaf("expired", days=-1),
    }
    known = authority.leaf("client")
    private = [path.read_text() for path in folder.rglob("*.key")]
    secrets = {
        *keys.values(),
        *(line for text in private for line in text.splitlines() if len(line) > 20),
        "PRIVATE KEY",
    }
    secrets -= {line for line in secrets if line.startswith("-----")}
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    flags += ["--api-keys", str(file), "--grpc-port", "0", "--http-port", "0", "--log-format", "json"]
    with Serving(model, *flags, *arguments) as serving:
        serving.wait_ready()
        environment = Path(f"/proc/{serving.actor('RouterActor')}/environ").read_bytes().split(b"\0")
        token = next(part for part in environment if part.startswith(b"RAY_AUTH_TOKEN="))
        secrets.add(token.partition(b"=")[2].decode())
        yield SecureCluster(serving, authority, keys, file, known, bad, secrets)
