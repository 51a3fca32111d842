"""Reception: takes connections in for a server of HTTP, through the TLS handshake where there is one.

asyncio's own way waits a minute for a handshake, and anybody may have begun as many as the process has files. Here one
has its time, and those under way count as connections do. It does not know what is said on a connection.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import ClassVar, Final

from ..open_files import HTTP_SHARE, most_connections

_NO_FILES_SECONDS: Final = 0.5


class Reception:
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

    async def open(self, listener: socket.socket) -> None:
        """Takes them from a socket that listens, until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except ConnectionAbortedError:  # it has gone again
                    continue
                except OSError:  # there is no file for it
                    await asyncio.sleep(_NO_FILES_SECONDS)
                    continue
                self._take(connection)
        finally:
            for handshake in list(self._handshakes):
                handshake.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _take(self, connection: socket.socket) -> None:
        # Without TLS there is somebody to tell why: the connection itself does.
        if self._context is not None and len(self._handshakes) + self._made() >= most_connections(self.share):
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
