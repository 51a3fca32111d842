"""Outbox: the messages that wait to be written to one router's stream.

The outbox is bounded in bytes: a router that reads too slowly is disconnected, and the engine never waits for a router.
An outbox is used in the service's event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from coatcheck.proto.stubs.worker_pb2 import FromGroup


class Outbox:
    """`buffer_bytes`: limit on the bytes that wait. `overflowed` is set when a message did not fit."""

    def __init__(self, buffer_bytes: int) -> None:
        self.overflowed = asyncio.Event()
        self._limit = buffer_bytes
        self._bytes = 0
        self._messages: deque[tuple[FromGroup, int]] = deque()  # with their bytes
        self._changed = asyncio.Event()
        self._written = asyncio.Event()  # set while no message waits
        self._written.set()
        self._is_closed = False
        self._is_ending = False

    def put_message(self, message: FromGroup) -> None:
        """Queue a message. Drop it and set `overflowed` if it does not fit."""
        size = message.ByteSize()
        self._bytes += size
        if self._bytes > self._limit:
            self.overflowed.set()
            return
        self._messages.append((message, size))
        self._written.clear()
        self._changed.set()

    async def wait_until_written(self) -> None:
        """Return once every message is written."""
        await self._written.wait()

    async def write_messages(self, write: Callable[[FromGroup], Awaitable[None]]) -> None:
        """Write queued messages until `close`, or until the message of `put_last_message` is written."""
        while not self._is_closed and not self._is_ending:
            await self._changed.wait()
            self._changed.clear()
            while not self._is_closed and self._messages:
                message, size = self._messages.popleft()
                await write(message)
                self._bytes -= size
            if not self._messages:
                self._written.set()

    def put_last_message(self, message: FromGroup) -> None:
        """Queue a last message, after which `write_messages` returns."""
        self._messages.append((message, 0))
        self._is_ending = True
        self._changed.set()

    def close(self) -> None:
        """Make `write_messages` return as soon as the current write is done."""
        self._is_closed = True
        self._changed.set()
