"""A small HTTPS server that speaks Kubernetes' events API: create, get, patch, with a service account's token."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate

from tests.router.certificates import TestAuthority

EVENTS = "/api/v1/namespaces/llm/events"


@dataclass
class KubernetesApi:
    """`events` by name. `calls`: method and HTTP code of each call. `refusals`: the HTTP codes with which the next
    calls are answered. `account`: the folder of the service account. `environment`: of its pod."""

    account: Path
    environment: dict[str, str]
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)

    def answer(self, method: str, path: str, token: str | None, kind: str | None, body: Any) -> tuple[int, Any]:
        """The HTTP code and the object that Kubernetes answers with."""
        code, answer = self._answer(method, path, token, kind, body)
        self.calls.append((method, code))
        return code, answer if code < 300 else {"kind": "Status", "code": code, "message": answer}

    def _answer(self, method: str, path: str, token: str | None, kind: str | None, body: Any) -> tuple[int, Any]:
        if token != f"Bearer {(self.account / 'token').read_text()}":
            return 401, "Unauthorized"
        if self.refusals:
            return self.refusals.pop(0), "events is forbidden: the account cannot create events"
        if method == "POST" and path == EVENTS and kind == "application/json":
            kubernetes_validate.validate(body, "1.34", strict=True)
            if (name := body["metadata"]["name"]) in self.events:
                return 409, f'events "{name}" already exists'
            self.events[name] = body
            return 201, body
        name = path.removeprefix(f"{EVENTS}/")
        if name not in self.events:
            return 404, f'events "{name}" not found'
        if method == "PATCH":
            if kind != "application/merge-patch+json":
                return 415, "the body of the request was in an unknown format"
            self.events[name].update(body)
        return 200, self.events[name]


@contextmanager
def kubernetes_api(folder: Path) -> Iterator[KubernetesApi]:
    """The server, and a service account in `folder`."""
    authority = TestAuthority(folder, "ca")
    authority.ca.rename(folder / "ca.crt")
    leaf = authority.leaf("kubernetes")
    (folder / "token").write_text("first")
    (folder / "namespace").write_text("llm")
    variables = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "POD_NAME": "demo-head-x", "POD_UID": "uid-of-the-pod"}
    api = KubernetesApi(folder, variables)

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            headers = self.headers
            code, answer = api.answer(
                self.command, self.path, headers["Authorization"], headers["Content-Type"], body
            )  # fmt: skip
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _handle

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(leaf.cert, leaf.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    variables["KUBERNETES_SERVICE_PORT"] = str(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
