"""`coatcheck batch` and a server with TLS."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.command_line import CommandResult, run_here
from tests.router.certificates import TestAuthority


class Handler(BaseHTTPRequestHandler):
    """Answers every request with an empty object."""

    def do_POST(self) -> None:
        """As a router would."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    """Signs the certificates of the server and its clients."""
    return TestAuthority(tmp_path / "tls")


@pytest.fixture
def server(authority: TestAuthority) -> Iterator[str]:
    """The URL of a server that asks clients for a certificate."""
    leaf = authority.leaf("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.load_cert_chain(leaf.cert, leaf.key)
    context.verify_mode = ssl.CERT_REQUIRED
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.socket = context.wrap_socket(made.socket, server_side=True)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    thread.join()
    made.server_close()


def send_one(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> CommandResult:
    """Run the command with one request."""
    source = folder / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}))
    return run_here("batch", str(source), "-o", str(folder / "out.jsonl"), *flags, environment=environment)


def test_a_server_that_asks_for_a_certificate(server: str, authority: TestAuthority, tmp_path: Path) -> None:
    """The client's certificate is given as for the other commands, by flags or by the environment."""
    leaf = authority.leaf("client")
    flags = {"tls-ca": str(authority.ca), "tls-cert": str(leaf.cert), "tls-key": str(leaf.key)}
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    done = send_one(tmp_path, "--server", server, *given)
    assert done.code == 0, done.err
    (tmp_path / "out.jsonl").unlink()
    environment = {f"COATCHECK_{name.replace('-', '_').upper()}": value for name, value in flags.items()}
    assert send_one(tmp_path, "--server", server, environment=environment).code == 0


def test_a_certificate_that_one_side_does_not_trust(server: str, authority: TestAuthority, tmp_path: Path) -> None:
    """The run ends at once, and the error names the flags. Without --tls-ca, and with `system`, the host's authorities
    are trusted, which did not sign the server's certificate."""
    for flags in ((), ("--tls-ca", "system"), ("--tls-ca", str(authority.ca))):
        done = send_one(tmp_path, "--server", server, *flags)
        assert done.code == 1 and done.err.startswith(f"error: no TLS connection to {server}: "), done.err
        assert done.err.endswith("see --tls-ca, --tls-cert and --tls-key\n") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tls-ca", "/missing.pem"), "/missing.pem: No such file or directory"),
        (("--tls-ca", __file__), f"--tls-ca {__file__} holds no certificate in PEM"),
        (("--tls-cert", __file__), "--tls-cert and --tls-key belong together; give both"),
        (("--api-key", "two\nlines"), "the API key contains characters that no key has; copy the key exactly"),
    ],
)
def test_wrong_credentials_are_refused(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    """Before anything is sent, with the words of the other commands."""
    done = send_one(tmp_path, "--server", "https://127.0.0.1:1", *flags)
    assert done.code == 2 and said in done.err, done.err
