"""HttpServer: uvicorn with bounded connections. It serves an ASGI application on the same event loop as gRPC."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import host_port, listen
from coatcheck.router.access.server_certificate import ServerCertificate
from coatcheck.router.http.acceptor import Acceptor
from coatcheck.router.http.http_protocol import BoundedHttpProtocol

_SEND_BYTES = 256 << 10
# Connections that the kernel holds until they are accepted; net.core.somaxconn limits this number. A client whose
# connection is beyond the limit tries again only after a second, and a burst has more than Python's default of 128.
_BACKLOG = 4096
# Longer than clients and load balancers keep an idle connection, usually 60 s. If the server closed first, a request
# that is on its way would be lost.
_KEEP_ALIVE_SECONDS = 75
_MIN_GRACE_SECONDS = 0.2  # for idle connections


class _UvicornServer(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        certificate: ServerCertificate | None,
        on_refused: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._certificate = certificate
        self._on_refused = on_refused
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts from `sockets` with the Acceptor in place of asyncio's server."""
        await super().startup([])
        acceptor = Acceptor(
            self._make_protocol,
            lambda: len(self.server_state.connections),
            self._on_refused,
            self._certificate.ssl_context() if self._certificate is not None else None,
        )
        self._accepting = [asyncio.create_task(acceptor.accept_from(listener)) for listener in sockets or ()]
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, then closes the open ones."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by the process and not by uvicorn."""
        yield


class HttpServer:
    """`on_refused` gets the reason when a connection is closed before its request was read."""

    def __init__(
        self,
        app: ASGIApp,
        certificate: ServerCertificate | None = None,
        slow_reader_seconds: float = 30.0,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(BoundedHttpProtocol, on_refused=on_refused),  # type: ignore[arg-type]  # it is only called
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._server = _UvicornServer(config, certificate, on_refused)
        self._slow_reader_seconds = slow_reader_seconds
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens; returns "host:port". Raises InvalidConfig if the port cannot be bound."""
        try:
            listener = listen(host, port, backlog=_BACKLOG)
        except OSError as error:
            raise InvalidConfig(
                f"cannot listen on {host_port(host, port)} for HTTP: {error.strerror}; choose another port, or 0 for "
                "any free one"
            ) from error
        # Connections inherit these options. asyncio sets TCP_NODELAY only on sockets with an explicit protocol number,
        # which these lack. A response is more than one write; with Nagle's algorithm the second would wait 40 ms for a
        # delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # How much of a response the kernel buffers for a client that does not read; text needs no more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        # The kernel closes connections whose client reads nothing, whatever the application is doing.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._slow_reader_seconds))
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        return host_port(host, listener.getsockname()[1])

    async def stop(self, grace_seconds: float) -> None:
        """Accepts no new requests; open ones get `grace_seconds` to end."""
        if self._task is None:
            return
        grace_seconds = max(grace_seconds, _MIN_GRACE_SECONDS)
        self._server.config.timeout_graceful_shutdown = grace_seconds  # type: ignore[assignment]  # any number will do
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
