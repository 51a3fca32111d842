"""SseResponse: a streamed response as server-sent events, each written as soon as GenerateService yields it."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateEvent
from coatcheck.router.http.disconnect import ClientDisconnected, while_connected
from coatcheck.router.http.errors import error_body
from coatcheck.router.openai.large_response import LargeResponses, sliced
from coatcheck.router.openai.response_parts import DONE, OpenAIResponse, sse_event

_log = logging.getLogger(__name__)

Events = AsyncGenerator[tuple[int, GenerateEvent], None]


class SseResponse(Response):
    """`events` has begun, so errors before its first event have become the HTTP status. `events` is closed when the
    client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, response: OpenAIResponse, large: LargeResponses) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._response = response
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except (ClientDisconnected, OSError):
            _log.debug("a client disconnected from its stream")

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for place, event in self._events:
                    for piece in sliced(await self._large.make_chunk(self._response, place, event)):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = self._response.make_end()
            except OSError:
                raise
            except Exception as error:  # the status is sent already, so the error becomes the last event
                last = sse_event(error_body(error)[1]) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
