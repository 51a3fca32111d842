"""wrap_app(): puts an ASGI application behind the router's middleware.

No byte of a body is kept before its sender is authenticated. Every ASGI scope is of type "http" (see HttpServer).
"""

import asyncio
import contextlib
import ipaddress
import re
import uuid
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coatcheck.proto.errors import PermissionDenied, Unauthenticated
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.tenant import Scope as TenantScope
from coatcheck.router.config import MESSAGE_BYTES
from coatcheck.router.http.errors import (
    ANTHROPIC_PATH,
    CONNECT_PATH,
    ErrorReport,
    error_response,
    report_error,
    report_refusal,
)
from coatcheck.router.telemetry.request_metrics import RequestMetrics

_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")  # safe to write to a log
# Domains that cannot be registered in the public DNS.
_LOCAL_DOMAINS: Final = (".localhost", ".internal")
_OPEN_PATHS: Final = {"/health", "/ping"}  # probes send no keys, and the response is one word
_MANAGE_PATHS: Final = {"/reset_prefix_cache"}
_GENERATE_PATHS: Final = (
    "/v1/", "/v2/", "/rerank", "/score", "/tokenize", "/detokenize", "/version", "/invocations",
    CONNECT_PATH,
)  # fmt: skip
# A browser asks its user for a key if `Basic` has a www-authenticate header of its own. Only paths that need the scope
# "observe", such as the dashboard, offer `Basic`.
_CHALLENGES: Final = {"generate": ("Bearer",), "manage": ("Bearer",), "observe": ('Basic realm="coatcheck"', "Bearer")}
# Parsing JSON blocks the event loop in proportion to its values: two seconds for this many.
_MAX_VALUES: Final = 1 << 21
# A body may take this long, and one second more for each _MIN_BYTES_PER_SECOND bytes that have arrived.
_BODY_SECONDS: Final = 30.0
_MIN_BYTES_PER_SECOND: Final = 8192
_LINGER_SECONDS: Final = 5.0


def wrap_app(
    app: ASGIApp,
    authenticator: Authenticator,
    metrics: RequestMetrics,
    *,
    check_host: bool,
    cors_origins: Sequence[str] = (),
    root_path: str = "",
) -> ASGIApp:
    """`check_host`: answer only requests whose Host header names an address or this host. `cors_origins`: origins whose
    web pages a browser lets read the responses; "*" for any. Preflight requests have no key and are answered before
    the client is authenticated. `root_path`: a prefix that paths may have, for a proxy that does not remove
    the prefix."""
    limited = BodyLimitMiddleware(app, metrics, MESSAGE_BYTES)
    gate = RequestGate(limited, authenticator, metrics, check_host=check_host, root_path=root_path)
    if not cors_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],
    )


class RequestGate:
    """Puts the request's id into `scope["request_id"]` and its tenant into `scope["tenant"]`, or refuses the request
    before any of its body is read.

    The id is the client's x-request-id if that is safe to log, or a new one. Every response has it as x-request-id, and
    those of Anthropic's API also as request-id, as Anthropic's clients read it.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        metrics: RequestMetrics,
        *,
        check_host: bool,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._authenticator = authenticator
        self._metrics = metrics
        self._check_host = check_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # as GET; the server sends no body
            scope = {**scope, "method": "GET"}
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        scope["request_id"] = request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = request_id
                # Anthropic's clients send anthropic-version to every path, and read only this header.
                if scope["path"].startswith(ANTHROPIC_PATH) or "anthropic-version" in headers:
                    response_headers["request-id"] = request_id
            await send(message)

        refusal = self._refuse_host(scope, headers) or self._authenticate(scope, headers)
        if refusal is not None:
            await respond_unread(scope, receive, send_with_id, refusal)
        else:
            await self._app(scope, receive, send_with_id)

    def _refuse_host(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of a request with several Host headers, or with one that names another host; else None.

        Of several headers a proxy may have read another one than this router (RFC 9112, 3.2). A check of the host
        prevents DNS rebinding:

        A router on loopback without keys serves every client that can connect. A web page in a browser on this host
        could let its own domain resolve to a loopback address, and the browser would let the page read the router's
        responses. The Host header still names the page's domain.
        """
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return error_response(report_refusal(400, "the request has several Host headers; send one"), scope["path"])
        host = hosts[0] if hosts else ""
        if not self._check_host or is_local_host(host):
            return None
        self._metrics.record_refusal("foreign_host")
        refusal = report_refusal(
            403,
            f"the Host header is {host[:80]!r}; this server listens on loopback without keys, and answers only to "
            "localhost and to addresses: use one of these, require keys (--api-keys), or start it with --insecure",
        )
        return error_response(refusal, scope["path"])

    def _authenticate(self, scope: Scope, headers: Headers) -> Response | None:
        """Sets scope["tenant"], except for probes. Returns the refusal of a request without valid credentials, with
        status 401 or 403; else None."""
        if scope["path"] in _OPEN_PATHS:
            return None
        required = _required_scope(scope["path"])
        try:
            scope["tenant"] = self._authenticator.authenticate(
                headers.get("authorization") or _authorization_of(headers.get("x-api-key")),
                required,
                basic=required == "observe" and scope["method"] == "GET",
                certificate=scope["state"].get("client_certificate") if "state" in scope else None,
            )
            return None
        except (Unauthenticated, PermissionDenied) as error:
            refusal = error_response(report_error(error), scope["path"])
            for challenge in _CHALLENGES[required] if refusal.status_code == 401 else ():
                refusal.headers.append("www-authenticate", challenge)
            return refusal


def _required_scope(path: str) -> TenantScope:
    if path in _MANAGE_PATHS:
        return "manage"
    return "generate" if path.startswith(_GENERATE_PATHS) else "observe"


def _authorization_of(key: str | None) -> str | None:
    """The authorization header that is equivalent to Anthropic's header x-api-key."""
    return f"Bearer {key}" if key else None


def is_local_host(host: str) -> bool:
    """Whether a Host header names an address or this host. A missing header counts as local: browsers always send
    one."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if not name or name == "localhost" or name.endswith(_LOCAL_DOMAINS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class BodyLimitMiddleware:
    """Refuses bodies that are too long, too slow or compressed.

    A declared length is checked before the body is read, an undeclared one as the body arrives. A small compressed body
    could unfold to any length.
    """

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, max_bytes: int, body_seconds: float = _BODY_SECONDS
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        encoding = headers.get("content-encoding", "identity")
        if int(length if length.isdigit() else 0) > self._max_bytes:
            await respond_unread(scope, receive, send, error_response(self._too_long(), scope["path"]))
            return
        if encoding.lower() != "identity":
            self._metrics.record_refusal("compressed_body")
            message = f"content-encoding is {encoding[:40]!r}; send the body uncompressed"
            await respond_unread(scope, receive, send, error_response(report_refusal(415, message), scope["path"]))
            return
        codings = ",".join(headers.getlist("transfer-encoding"))
        if {coding.strip().lower() for coding in codings.split(",")} - {"", "chunked"}:
            # 501: RFC 9112, 6.1. The parser removes only the chunks, and refuses a body whose last coding is another.
            self._metrics.record_refusal("compressed_body")
            message = f"transfer-encoding is {codings[:40]!r}; send the body uncompressed, with chunked alone"
            await respond_unread(scope, receive, send, error_response(report_refusal(501, message), scope["path"]))
            return
        received, values, has_more = 0, 0, True
        refusal: ErrorReport | None = None
        deadline = asyncio.get_running_loop().time() + self._body_seconds

        async def receive_limited() -> Message:
            nonlocal received, values, has_more, refusal
            if not has_more or refusal is not None:  # the application waits for the client to disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline + received / _MIN_BYTES_PER_SECOND):
                    message = await receive()
            except TimeoutError:
                self._metrics.record_refusal("slow_body")
                refusal = report_refusal(408, "the body came too slowly; send it at once")
                return {"type": "http.disconnect"}
            body = message.get("body", b"")
            received += len(body)
            values += body.count(b",") + body.count(b"[") + body.count(b"{")
            has_more = message.get("more_body", False)
            if received > self._max_bytes or values > _MAX_VALUES:
                refusal = self._too_long()
                return {"type": "http.disconnect"}
            return message

        async def send_unless_refused(message: Message) -> None:
            if refusal is None:
                await send(message)

        try:
            await self._app(scope, receive_limited, send_unless_refused)
        finally:
            if refusal is not None:
                has_more = has_more and refusal.status != 408
                response = error_response(refusal, scope["path"])
                await respond_unread(scope, receive, send, response, has_more=has_more)

    def _too_long(self) -> ErrorReport:
        self._metrics.record_refusal("long_body")
        return report_refusal(
            413, f"the body has more than {self._max_bytes} bytes, or {_MAX_VALUES} values; send less at once"
        )


async def respond_unread(
    scope: Scope, receive: Receive, send: Send, response: Response, *, has_more: bool | None = None
) -> None:
    """Responds to a request whose body is not used, and closes the connection.

    A client that is still sending reads no response, so its body is received and dropped first, for at most
    _LINGER_SECONDS. `has_more`: whether any of the body may still come; None if nothing of it was received yet. Then a
    client that has sent `Expect: 100-continue` waits for a response before it sends its body.
    """
    if has_more is None:
        has_more = Headers(scope=scope).get("expect", "").lower() != "100-continue"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while has_more:
                has_more = (await receive()).get("more_body", False)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
