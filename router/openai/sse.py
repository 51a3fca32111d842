"""SseStream: an answer as server-sent events, written as the core makes it.

It does not know what the chunks say.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateEvent
from coatcheck.router.http.disconnect import ClientDisconnected, while_connected
from coatcheck.router.http.errors import error_body
from coatcheck.router.openai.large_response import LargeResponses, StreamedResponse, sliced
from coatcheck.router.openai.response_parts import DONE, server_sent

_log = logging.getLogger(__name__)

Events = AsyncGenerator[tuple[int, GenerateEvent], None]


class SseStream(Response):
    """`events` have begun, so that what is refused was refused before. A client that leaves closes them."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, answer: StreamedResponse, large: LargeResponses) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._answer = answer
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes all of it; as ASGI has it."""
        try:
            await while_connected(receive, self._write(send))
        except (ClientDisconnected, OSError):
            _log.debug("a client left its stream")

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for place, event in self._events:
                    for piece in sliced(await self._large.chunk(self._answer, place, event)):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = self._answer.end()
            except OSError:
                raise
            except Exception as error:  # the status is long sent: the stream itself says what went wrong
                last = server_sent(error_body(error)[1]) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
