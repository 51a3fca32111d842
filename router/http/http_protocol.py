"""BoundedHttpProtocol: a connection of HTTP whose client may neither send for ever nor wait for ever.

A server's own protocol (uvicorn's) takes a head of any length and waits for it as long as it takes, before anybody has
asked who is there. Here a head has its time and its length, and there are so many connections. It does not know what
is asked, nor what a body may be (see body_limit).
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coatcheck.router.access.connection_limits import HTTP_SHARE, most_connections
from coatcheck.router.http.errors import refusal
from coatcheck.router.http.json_response import JsonBody

HEAD_BYTES: Final = 64 << 10  # and what one read brings beyond it
# How long a refused client may take to read why, and to close. A connection that is closed before all that its client
# sent is read is reset, and the reset drops the answer: of 2,500 clients beyond the limit 1,200 saw no 503.
_LINGER_SECONDS: Final = 1.0
_REASONS: Final = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
                   503: b"Service Unavailable"}  # fmt: skip
# What a client says of HTTP/2 in the hope of changing to it. We stay, as we may.
_UPGRADE: Final = {b"upgrade", b"http2-settings"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """Made by the server for each connection; `on_refused` is told why one is ended."""

    head_seconds: ClassVar[float] = 10.0

    def __init__(self, *, on_refused: Callable[[str], None] = lambda reason: None, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._on_refused = on_refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """The first head is awaited from now on."""
        self._in_head = True
        self._head_bytes = 0
        self._staying = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > most_connections(HTTP_SHARE):
            self._refuse(503, "connections", "this server has as many connections as it may; close some, or try again")
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited."""
        self._head_came()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, whatever the client would rather speak; drops what a refused client still sends."""
        if self._linger_timer is not None:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        if self._in_head or not self._is_answering:  # else what came is of a body
            self._await_head()
        self._head_bytes += len(data) if self._in_head else 0
        if self._head_bytes > HEAD_BYTES:
            self._refuse(
                431, "long_head", f"the head of this request has more than {HEAD_BYTES} bytes; send less in it"
            )

    def on_message_begin(self) -> None:
        """The certificate that the client has shown goes with its requests."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        encrypted: Any = self.transport.get_extra_info("ssl_object")
        if encrypted is not None:
            self.scope["state"]["client_certificate"] = encrypted.getpeercert(binary_form=True)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_came()
        self._in_head = False
        self._staying = bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"
        if not self._staying:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of its body is there."""
        if not self._staying:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(
            400, "not_http", "this cannot be read as HTTP/1.1; check what is sent, and whether this port speaks TLS"
        )

    def _stay(self, rest: bytes) -> None:
        """The parser takes a request for an upgrade to have no body. It is read anew as the request that it is without
        one: that is how it would be answered by a server that has never heard of HTTP/2."""
        if self.transport.is_closing():
            return
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(part for part in value.split(b",") if part.strip().lower() not in _UPGRADE)
            if name not in _UPGRADE and value:
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_answering:
            self._await_head()  # it has begun with the next request before the answer to this one is whole
        elif self._in_head and self._head_bytes:
            message = f"the head of this request did not come within {self.head_seconds:g} s; send it at once"
            self._refuse(408, "slow_head", message)
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Ends the connection; where an answer is under way, there is no place for another."""
        self._head_came()
        self._on_refused(reason)
        if not self._is_answering:
            body = JsonBody(refusal(status, message), status).body
            head = (
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head % (status, _REASONS[status], len(body)) + bytes(body))
            if self.transport.can_write_eof():  # not over TLS
                self.transport.write_eof()
                self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
                return
        self.transport.close()
