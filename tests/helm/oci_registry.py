"""A small registry that speaks what `helm push` and `helm pull` need of the OCI distribution specification."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def oci_registry() -> Iterator[str]:
    """Its address. It keeps blobs and manifests by digest, and manifests also by tag."""
    contents: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def _respond(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            for name, text in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _look_up(self) -> None:
            name = urlsplit(self.path).path.rpartition("/")[2]
            if self.path.rstrip("/") == "/v2":
                self._respond(200)
            elif (body := contents.get(name)) is None:
                self._respond(404)
            else:
                kind = _MANIFEST if "/manifests/" in self.path else "application/octet-stream"
                self._respond(200, body, Content_Type=kind, Docker_Content_Digest=digest_of(body))

        do_GET = do_HEAD = _look_up

        def do_POST(self) -> None:
            self._respond(202, Location=f"{urlsplit(self.path).path}upload")

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            url = urlsplit(self.path)
            digest = digest_of(body)
            if parse_qs(url.query).get("digest", [digest]) != [digest]:
                return self._respond(400)
            contents[digest] = body
            if "/manifests/" in url.path:
                contents[url.path.rpartition("/")[2]] = body
            self._respond(201, Location=url.path, Docker_Content_Digest=digest)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
