"""EventStream: an answer as server-sent events, written as the core makes it.

It does not know what the chunks say.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...proto.coatcheck_pb2 import GenerateEvent
from .answer import DONE, server_sent
from .connection import ClientGone, while_connected
from .error_body import error_body

_log = logging.getLogger(__name__)

Events = AsyncGenerator[tuple[int, GenerateEvent], None]


class Answer(Protocol):
    """Turns events into chunks."""

    def chunk(self, place: int, event: GenerateEvent) -> bytes:
        """Of an event of the prompt at `place`; may be empty."""

    def is_slow_to_encode(self, place: int, event: GenerateEvent) -> bool:
        """Whether `chunk` would take too long for the event loop, so that a thread must call it."""

    def end(self) -> bytes:
        """What comes last."""


class EventStream(Response):
    """`events` have begun, so that what is refused was refused before. A client that leaves closes them."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes all of it; as ASGI has it."""
        try:
            await while_connected(receive, self._write(send))
        except (ClientGone, OSError):
            _log.debug("a client left its stream")

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for place, event in self._events:
                    if self._answer.is_slow_to_encode(place, event):
                        chunk = await asyncio.to_thread(self._answer.chunk, place, event)
                    else:
                        chunk = self._answer.chunk(place, event)
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = self._answer.end()
            except OSError:
                raise
            except Exception as error:  # the status is long sent: the stream itself says what went wrong
                last = server_sent(error_body(error)[1]) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
