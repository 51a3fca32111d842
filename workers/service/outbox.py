"""Outbox: the messages that wait to be written to one router's stream.

The outbox is bounded in bytes: a router that reads too slowly is disconnected, and the engine never waits for a router.
A snapshot is built chunk by chunk, only when no other message waits. KV events are held back until the snapshot is
written; tokens are not. An outbox is used in the service's event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from coatcheck.proto.stubs.worker_pb2 import FromGroup


class Outbox:
    """`buffer_bytes`: limit on the bytes that wait. `overflowed` is set when a message did not fit."""

    def __init__(self, buffer_bytes: int) -> None:
        self.overflowed = asyncio.Event()
        self._limit = buffer_bytes
        self._bytes = 0
        self._messages: deque[FromGroup] = deque()
        self._held_events: deque[FromGroup] | None = None  # None: no snapshot is pending
        self._snapshot: Iterator[FromGroup] | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self._is_ending = False

    @property
    def has_pending_snapshot(self) -> bool:
        """Whether a snapshot is being taken or written."""
        return self._held_events is not None

    def put_message(self, message: FromGroup) -> None:
        """Queue a message. Drop it and set `overflowed` if it does not fit."""
        self._bytes += message.ByteSize()
        if self._bytes > self._limit:
            self.overflowed.set()
            return
        if self._held_events is not None and message.HasField("events"):
            self._held_events.append(message)
        else:
            self._messages.append(message)
            self._changed.set()

    def hold_events(self) -> None:
        """Hold KV events back from now on; `put_snapshot` must follow."""
        self._held_events = deque()

    def put_snapshot(self, sequence: int, chunks: Iterator[FromGroup]) -> None:
        """Queue a snapshot that contains every event before `sequence`. Drop the held events that it contains."""
        assert self._held_events is not None, "hold_events comes first"
        for message in self._held_events:
            self._bytes -= message.ByteSize() if message.events.sequence < sequence else 0
        self._held_events = deque(message for message in self._held_events if message.events.sequence >= sequence)
        self._snapshot = chunks
        self._changed.set()

    async def write_messages(self, write: Callable[[FromGroup], Awaitable[None]]) -> None:
        """Write queued messages until `close`, or until the message of `put_last_message` is written."""
        while not self._is_closed and not self._is_ending:
            await self._changed.wait()
            self._changed.clear()
            while not self._is_closed and (self._messages or self._snapshot is not None):
                if self._messages:
                    message = self._messages.popleft()
                    await write(message)
                    self._bytes -= message.ByteSize()
                elif chunk := next(self._snapshot or iter(()), None):
                    await write(chunk)
                else:
                    self._messages, self._held_events, self._snapshot = self._held_events or deque(), None, None

    def put_last_message(self, message: FromGroup) -> None:
        """Queue a last message, after which `write_messages` returns. A pending snapshot is dropped."""
        self._snapshot = None
        self._messages.append(message)
        self._is_ending = True
        self._changed.set()

    def close(self) -> None:
        """Make `write_messages` return as soon as the current write is done."""
        self._is_closed = True
        self._changed.set()
