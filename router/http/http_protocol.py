"""BoundedHttpProtocol: uvicorn's protocol of one connection, with limits on the head of a request.

uvicorn itself accepts a head of any length and waits for it without limit, before the client is authenticated. Here the
head's time and length and the number of connections are limited. BodyLimitMiddleware limits the body.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, ClassVar, Final

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coatcheck.router.access.connection_limits import HTTP_SHARE, max_connections
from coatcheck.router.http.errors import error_response, report_refusal

HEAD_BYTES: Final = 64 << 10  # checked after each read from the socket
# How long a refused client may take to read the response and to close. Closing a connection before all that the client
# sent is read resets it, and the reset drops the response: of 2,500 clients beyond the limit 1,200 saw no 503.
_LINGER_SECONDS: Final = 1.0
_REASONS: Final = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
                   503: b"Service Unavailable"}  # fmt: skip
# How often the state of a connection is checked while nothing is read from it.
_STATE_SECONDS: Final = 0.25
# Values of tcpi_state in <netinet/tcp.h>.
_TCP_CLOSE: Final = 7  # the connection was reset
_TCP_CLOSE_WAIT: Final = 8  # the client has closed the connection, or its half
# Headers that offer an upgrade to HTTP/2, which a server may decline.
_UPGRADE_HEADERS: Final = {b"upgrade", b"http2-settings"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """`on_refused` gets the reason when the connection is closed."""

    head_seconds: ClassVar[float] = 10.0

    def __init__(self, *, on_refused: Callable[[str], None] = lambda reason: None, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._on_refused = on_refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Starts the timer of the first head; refuses a connection beyond the limit."""
        self._in_head = True
        self._head_bytes = 0
        self._is_upgrade_declined = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._state_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._waiting_refusal = b""  # sent after the responses to the requests before it
        # The request that is answered now, or was answered last. `cycle`, uvicorn's field, is the request that was
        # received last.
        self._running: RequestResponseCycle | None = None
        super().connection_made(transport)
        if len(self.connections) > max_connections(HTTP_SHARE):
            self._refuse(503, "connections", "this server has reached its limit of connections; try again later")
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if self._state_timer is not None:
            self._state_timer.cancel()
        # uvicorn itself notifies only the request that was received last, which may wait behind the running one.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio closes the connection unless this returns True
        """Keeps the connection of a client that has ended its half of it, as with shutdown(SHUT_WR) or `nc -N`, and
        still reads. Returns False, which closes the connection, in all other cases.

        A client that has closed its socket looks the same until the server sends something: then the client's kernel
        resets the connection. So the first byte of the response, which is always an H, is sent at once, and a reset
        cancels the request. If the client reads this byte and closes its socket later, the server notices that only
        when it writes the rest. If the client ends its half after the response has begun, the connection is closed,
        because a stream may send nothing for long, and only a write tells whether the client is gone.
        """
        running = self._running
        if running is None or running.response_complete or running.response_started:
            return False
        if self.pipeline and self.cycle.more_body:
            self._drop_last_request(running)
        if self.cycle.more_body:
            return False
        if self.scheme == "https":  # asyncio's TLS cannot half-close
            return False
        self._stop_head_timer()
        if not self._waiting_refusal:
            self.cycle.keep_alive = False
        self.transport.write(b"H")
        transport: Any = _WithoutFirstByte(self.transport)
        running.transport = transport
        self._is_half_closed = True
        self._start_state_timer()
        return True

    def _drop_last_request(self, running: RequestResponseCycle) -> None:
        """Forgets the request that was received last, whose body stays incomplete. Those before it are answered."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else running

    def _start_state_timer(self) -> None:
        if self._state_timer is None:
            self._state_timer = self.loop.call_later(_STATE_SECONDS, self._check_state)

    def _check_state(self) -> None:
        """Aborts a connection that the client has reset. Resumes reading if the client has ended its half: uvicorn
        pauses reading while a request waits behind another, and would not notice the end."""
        self._state_timer = None
        info: bytes = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if info[0] == _TCP_CLOSE:
            self.transport.abort()
            return
        if info[0] == _TCP_CLOSE_WAIT:
            self.flow.resume_reading()
        if self._is_half_closed or self.pipeline:
            self._start_state_timer()

    def data_received(self, data: bytes) -> None:
        """Parses; declines upgrades to HTTP/2; drops what a refused client still sends."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing() or self._is_refused:
            return
        if self._in_head or not self._is_answering:  # otherwise the data is part of a body
            self._start_head_timer()
        self._head_bytes += len(data) if self._in_head else 0
        if self._head_bytes > HEAD_BYTES:
            self._refuse(
                431, "long_head", f"the head of this request has more than {HEAD_BYTES} bytes; send less in it"
            )

    def on_message_begin(self) -> None:
        """Passes the client's TLS certificate on in the scope."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        encrypted: Any = self.transport.get_extra_info("ssl_object")
        if encrypted is not None:
            self.scope["state"]["client_certificate"] = encrypted.getpeercert(binary_form=True)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._in_head = False
        self._is_upgrade_declined = bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"
        if not self._is_upgrade_declined:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                cycle: Any = self.cycle
                cycle.send = _without_chunks(cycle, cycle.send)
            if self.pipeline:
                self._start_state_timer()
            else:
                self._running = self.cycle

    def on_response_complete(self) -> None:
        """Starts the next request that waits. After the last one, sends the refusal that waits."""
        has_next = bool(self.pipeline)
        if has_next and not self.transport.is_closing():
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._waiting_refusal and not has_next and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._close_with(self._waiting_refusal)

    def on_message_complete(self) -> None:
        if not self._is_upgrade_declined:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            400, "not_http", "this cannot be read as HTTP/1.1; check what is sent, and whether this port speaks TLS"
        )

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parses the request again without its upgrade headers. The parser takes a request that offers an upgrade to
        have no body; a server without HTTP/2 reads it as an ordinary one."""
        if self.transport.is_closing():
            return
        head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(part for part in value.split(b",") if part.strip().lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and value:
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_refused(self) -> bool:
        return bool(self._waiting_refusal) or self._linger_timer is not None

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_answering:
            self._start_head_timer()  # the next request has begun before the response to this one is complete
        elif self._in_head and self._head_bytes:
            message = f"the head of this request did not come within {self.head_seconds:g} s; send it at once"
            self._refuse(408, "slow_head", message)
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Responds with an error and closes the connection. Requests that were received before the refused one are
        answered first."""
        self._stop_head_timer()
        self._on_refused(reason)
        body = bytes(error_response(report_refusal(status, message)).body)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        refusal = head % (status, _REASONS[status], len(body)) + body
        is_in_body = self._is_answering and not self._in_head and self.cycle.more_body
        if is_in_body and self.pipeline:
            assert self._running is not None
            self._drop_last_request(self._running)
        elif is_in_body and self.cycle.response_started:
            self.transport.close()
            return
        elif is_in_body:  # the application sees a disconnect, and its response is dropped
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._is_answering and not self.cycle.disconnected:
            self._waiting_refusal = refusal
        else:
            self._close_with(refusal)

    def _close_with(self, refusal: bytes) -> None:
        """Writes `refusal` and closes the connection, over TCP once the client has had time to read."""
        self.transport.write(refusal)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


class _WithoutFirstByte:
    """A transport that leaves out the first byte of a response: eof_received has sent it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_first = True

    def write(self, data: bytes) -> None:
        self._transport.write(data[1:] if self._is_first else data)
        self._is_first = False

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


def _without_chunks(cycle: RequestResponseCycle, send: Send) -> Send:
    """A `send` for an HTTP/1.0 client, which cannot read chunks: a response without a content-length is sent as it is,
    and ends when the connection closes."""
    has_length = True

    async def send_part(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_part
