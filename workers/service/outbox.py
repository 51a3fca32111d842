"""Outbox: one attached router's outbox.

Messages wait here until the stream takes them. The bound is in bytes: a router that reads too slowly is cut off, and
the engine never waits for it. A snapshot is made chunk by chunk, only when nothing else waits; KV events are held back
behind it, tokens are not. It lives in the service's event loop and does not know what else messages mean.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from coatcheck.proto.stubs.worker_pb2 import FromGroup


class Outbox:
    """`number` is unique in this incarnation of the group; `router` is the router's own name. `submissions`: how many
    of its submissions the engine has processed; only the engine's thread reads and writes it."""

    def __init__(self, number: int, router: str, *, buffer_bytes: int) -> None:
        self.number = number
        self.router = router
        self.submissions = 0
        self.overflowed = asyncio.Event()
        self._limit = buffer_bytes
        self._bytes = 0
        self._messages: deque[FromGroup] = deque()
        self._held: deque[FromGroup] | None = None
        self._chunks: Iterator[FromGroup] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._ending = False

    @property
    def takes_snapshot(self) -> bool:
        """Whether a snapshot is under way."""
        return self._held is not None

    def put(self, message: FromGroup) -> None:
        """Queues a message; past the limit `overflowed` is set and nothing more is kept."""
        self._bytes += message.ByteSize()
        if self._bytes > self._limit:
            self.overflowed.set()
            return
        if self._held is not None and message.HasField("events"):
            self._held.append(message)
        else:
            self._messages.append(message)
            self._changed.set()

    def hold_events(self) -> None:
        """From here on events wait for the snapshot that is about to be taken."""
        self._held = deque()

    def put_snapshot(self, sequence: int, chunks: Iterator[FromGroup]) -> None:
        """Queues a snapshot that holds every event before `sequence`; held ones that it contains are dropped."""
        assert self._held is not None, "hold_events comes first"
        for message in self._held:
            self._bytes -= message.ByteSize() if message.events.sequence < sequence else 0
        self._held = deque(message for message in self._held if message.events.sequence >= sequence)
        self._chunks = chunks
        self._changed.set()

    async def write_to(self, write: Callable[[FromGroup], Awaitable[None]]) -> None:
        """Writes what is queued, until `close`, or until all of it is written after `end`."""
        while not self._closed and not self._ending:
            await self._changed.wait()
            self._changed.clear()
            while not self._closed and (self._messages or self._chunks is not None):
                if self._messages:
                    message = self._messages.popleft()
                    await write(message)
                    self._bytes -= message.ByteSize()
                elif chunk := next(self._chunks or iter(()), None):
                    await write(chunk)
                else:
                    self._messages, self._held, self._chunks = self._held or deque(), None, None

    def end(self, last: FromGroup) -> None:
        """A last message; `write_to` returns behind it, whatever a snapshot has held back."""
        self._chunks = None
        self._messages.append(last)
        self._ending = True
        self._changed.set()

    def close(self) -> None:
        """`write_to` returns once the write under way is done."""
        self._closed = True
        self._changed.set()
