"""Acceptor: takes connections in for a server of HTTP, through the TLS handshake where there is one.

asyncio's own way waits a minute for a handshake, and anybody may have begun as many as the process has files. Here one
has its time, and those under way count as connections do. It does not know what is said on a connection.
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable
from typing import ClassVar, Final

from coatcheck.router.access.connection_limits import HTTP_SHARE, most_connections

# accept() does not yield to the event loop while connections wait; a burst of thousands would stop every stream.
_ACCEPTED_AT_ONCE: Final = 32
# Refused clients that may be reading why, as a share of the connections that are served. While there are as many,
# further ones wait in the kernel.
_LINGERING_SHARE: Final = 0.25
_FULL_SECONDS: Final = 0.05
_NO_FILES_SECONDS: Final = 0.5
_WARNING_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)


class Acceptor:
    """`open` returns when it is closed. `made` are the connections that have come through; `protocol` makes one."""

    handshake_seconds: ClassVar[float] = 10.0
    share: ClassVar[float] = HTTP_SHARE

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        made: Callable[[], int],
        on_refused: Callable[[str], None],
        context: ssl.SSLContext | None,
    ) -> None:
        self._protocol = protocol
        self._made = made
        self._on_refused = on_refused
        self._context = context
        self._handshakes = set[asyncio.Task[None]]()
        self._warned_at = -math.inf

    async def open(self, listener: socket.socket) -> None:
        """Takes them from a socket that listens, until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        accepted = 0
        try:
            while True:
                if self._count() > (1 + _LINGERING_SHARE) * most_connections(self.share):
                    await asyncio.sleep(_FULL_SECONDS)
                    continue
                try:
                    connection, _ = await loop.sock_accept(listener)
                except ConnectionAbortedError:  # it has gone again
                    continue
                except OSError as error:  # there is no file for it
                    self._warn(error)
                    await asyncio.sleep(_NO_FILES_SECONDS)
                    continue
                self._take(connection)
                accepted += 1
                if accepted % _ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            for handshake in list(self._handshakes):
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _count(self) -> int:
        """Connections, and those that become some."""
        return len(self._handshakes) + self._made()

    def _warn(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= _WARNING_SECONDS:
            self._warned_at = now
            _log.warning(
                "new HTTP connections wait, because accept failed: %s; raise this process's limit of open files "
                "(ulimit -n)",
                error.strerror or error,
            )

    def _take(self, connection: socket.socket) -> None:
        # Without TLS there is somebody to tell why: the connection itself does.
        if self._context is not None and self._count() >= most_connections(self.share):
            self._on_refused("connections")
            connection.close()
            return
        handshake = asyncio.create_task(self._shake_hands(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        seconds = self.handshake_seconds if self._context is not None else None
        with contextlib.suppress(OSError):  # the client's affair; asyncio has closed it
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
