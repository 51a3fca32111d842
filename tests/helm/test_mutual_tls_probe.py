"""The readiness probe of routers that ask clients for certificates, run with wget against a server that does."""

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.helm.chart import render
from tests.programs.find import need_program
from tests.router.certificates import TestAuthority


@contextmanager
def https_server(folder: Path, status: int) -> Iterator[int]:
    """Answers every request of a client with a certificate with `status`. Yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The folder where the secret is mounted."""
    authority = TestAuthority(tmp_path / "authority")
    leaf = authority.leaf("router")
    folder = tmp_path / "tls"
    folder.mkdir()
    for made, name in ((leaf.cert, "tls.crt"), (leaf.key, "tls.key"), (authority.ca, "ca.crt")):
        shutil.copy(made, folder / name)
    return folder


def probe(secret: Path, port: int) -> int:
    """The exit status of the probe's command."""
    need_program("wget")
    router = render("eight-gpus", "tls.clientCaKey=ca.crt").container("router")["readinessProbe"]
    assert "tcpSocket" not in router and "httpGet" not in router
    command = [part.replace("/etc/coatcheck-tls", str(secret)) for part in router["exec"]["command"]]
    command[-1] = command[-1].replace("https://demo-coatcheck:8000", f"https://localhost:{port}")
    return subprocess.run(command, timeout=MAX_WAIT_SECONDS, env={"PATH": "/usr/bin:/bin"}).returncode


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (503, False)])
def test_health_decides(secret: Path, status: int, is_ready: bool) -> None:
    """A router that is up but refuses requests is not ready. A TCP connection would not tell."""
    with https_server(secret, status) as port:
        assert (probe(secret, port) == 0) == is_ready


def test_a_router_without_the_right_certificate_is_not_ready(secret: Path, tmp_path: Path) -> None:
    """The probe trusts the authority in the secret and no other."""
    stranger = TestAuthority(tmp_path / "other", "other")
    with https_server(secret, 200) as port:
        shutil.copy(stranger.ca, secret / "ca.crt")
        assert probe(secret, port) != 0
