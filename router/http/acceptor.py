"""Acceptor: accepts the connections of an HTTP server and does their TLS handshakes, within limits.

asyncio's own server allows a minute for a handshake and any number of handshakes at once, so clients could use up all
files of the process. Here a handshake has a shorter time limit, and open handshakes count as connections.
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable
from typing import ClassVar, Final

from coatcheck.router.access.connection_limits import HTTP_SHARE, max_connections

# accept() does not yield to the event loop while connections wait; a burst of thousands would stop every stream.
_ACCEPTED_AT_ONCE: Final = 32
# Connections beyond the limit that may be open to read their refusal, as a share of the limit. Beyond that further
# connections wait in the kernel.
_LINGERING_SHARE: Final = 0.25
_FULL_SECONDS: Final = 0.05
_NO_FILES_SECONDS: Final = 0.5
_WARNING_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)


class Acceptor:
    """`protocol` makes the asyncio protocol of a connection. `count_open` returns the number of connections that have
    passed their handshake. `on_refused` gets the reason of each refusal. `share`: of the process's open files, which
    limits the connections (see max_connections)."""

    handshake_seconds: ClassVar[float] = 10.0
    share: ClassVar[float] = HTTP_SHARE

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        count_open: Callable[[], int],
        on_refused: Callable[[str], None],
        context: ssl.SSLContext | None,
    ) -> None:
        self._protocol = protocol
        self._count_open = count_open
        self._on_refused = on_refused
        self._context = context
        self._handshakes = set[asyncio.Task[None]]()
        self._warned_at = -math.inf

    async def accept_from(self, listener: socket.socket) -> None:
        """Accepts connections from a listening socket until this task is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        accepted = 0
        try:
            while True:
                if self._count() > (1 + _LINGERING_SHARE) * max_connections(self.share):
                    await asyncio.sleep(_FULL_SECONDS)
                    continue
                try:
                    connection, _ = await loop.sock_accept(listener)
                except ConnectionAbortedError:  # the client has closed it already
                    continue
                except OSError as error:  # usually: too many open files
                    self._warn(error)
                    await asyncio.sleep(_NO_FILES_SECONDS)
                    continue
                self._begin_connection(connection)
                accepted += 1
                if accepted % _ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            for handshake in list(self._handshakes):
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _count(self) -> int:
        """Open connections and handshakes."""
        return len(self._handshakes) + self._count_open()

    def _warn(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= _WARNING_SECONDS:
            self._warned_at = now
            _log.warning(
                "new HTTP connections wait, because accept failed: %s; raise this process's limit of open files "
                "(ulimit -n)",
                error.strerror or error,
            )

    def _begin_connection(self, connection: socket.socket) -> None:
        # Without TLS the connection itself responds 503 (see BoundedHttpProtocol).
        if self._context is not None and self._count() >= max_connections(self.share):
            self._on_refused("connections")
            connection.close()
            return
        handshake = asyncio.create_task(self._shake_hands(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        seconds = self.handshake_seconds if self._context is not None else None
        with contextlib.suppress(OSError):  # asyncio has closed the connection
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
