"""HttpServer: serves an ASGI application in the event loop that it is started in, beside whatever else runs there."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.access.server_certificate import ServerCertificate
from coatcheck.router.http.acceptor import Acceptor
from coatcheck.router.http.http_protocol import BoundedHttpProtocol

_SEND_BYTES = 256 << 10
# Connections that the kernel holds until they are accepted; it takes less if net.core.somaxconn is less. TCP tries
# again only after a second for a connection beyond that, and Python's own 128 are fewer than a burst brings.
_BACKLOG = 4096
# Longer than clients and balancers keep an idle connection (60 s are usual): who closes first must not be the server,
# or a request crosses the news and is lost.
_KEEP_ALIVE_SECONDS = 75
_SHORTEST_GRACE = 0.2  # for connections that are merely kept open


class _Quiet(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        certificate: ServerCertificate | None,
        on_refused: Callable[[str], None],
        reception: type[Acceptor],
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._certificate = certificate
        self._on_refused = on_refused
        self._reception = reception
        self._open: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens to the sockets as the reception does, and says when it is done."""
        await super().startup([])
        reception = self._reception(
            self._connection,
            lambda: len(self.server_state.connections),
            self._on_refused,
            self._certificate.ssl_context() if self._certificate is not None else None,
        )
        self._open = [asyncio.create_task(reception.open(listener)) for listener in sockets or ()]
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more in, then ends what is there."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await super().shutdown(sockets)

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them to whoever owns the process."""
        yield


class HttpServer:
    """`start`, then `stop`; `on_refused` is told why a connection is ended before its request was read."""

    def __init__(
        self,
        app: ASGIApp,
        certificate: ServerCertificate | None = None,
        slow_reader_seconds: float = 30.0,
        connection: type[BoundedHttpProtocol] = BoundedHttpProtocol,
        reception: type[Acceptor] = Acceptor,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=partial(connection, on_refused=on_refused),  # type: ignore[arg-type]  # it is only called
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._server = _Quiet(config, certificate, on_refused, reception)
        self._slow_reader_seconds = slow_reader_seconds
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens; returns "host:port". Raises InvalidConfig when the port is taken."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise InvalidConfig(
                f"cannot listen on {host}:{port} for HTTP: {error.strerror}; choose another port, or 0 for any free one"
            ) from error
        # Connections inherit it; asyncio sets it only on sockets that name their protocol, which these do not. An
        # answer is more than one write, and without it the second waits for a delayed acknowledgement, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What the kernel may hold of an answer that nobody takes; text needs no more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        # As they inherit this: the kernel itself ends connections whose client takes nothing, whatever is amid what.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._slow_reader_seconds))
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace_seconds: float) -> None:
        """Takes no new requests; open ones get that long."""
        if self._task is None:
            return
        grace_seconds = max(grace_seconds, _SHORTEST_GRACE)
        self._server.config.timeout_graceful_shutdown = grace_seconds  # type: ignore[assignment]  # any number will do
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
