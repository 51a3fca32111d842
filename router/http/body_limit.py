"""BodyLimit: a request's body may have so many bytes, whether its client says how many there are or not, and so much
time to come.
"""

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coatcheck.router.http.errors import refusal
from coatcheck.router.http.json_response import JsonBody
from coatcheck.router.http.unread import answer_unread
from coatcheck.router.telemetry.request_metrics import RequestMetrics

# Reading JSON takes as long as there are values in it, and nothing else goes on meanwhile: two seconds for these.
_MOST_VALUES: Final = 1 << 21
# A body has so long, and longer the more of it has come.
_SECONDS: Final = 30.0
_SLOWEST_BYTES_PER_SECOND: Final = 8192


class BodyLimit:
    """An ASGI application around another. What is too long is refused before it is read, or as soon as it shows; so is
    what is compressed, since a small body may unfold to any length."""

    def __init__(self, app: ASGIApp, measures: RequestMetrics, most_bytes: int, seconds: float = _SECONDS) -> None:
        self._app = app
        self._measures = measures
        self._most_bytes = most_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        encoding = headers.get("content-encoding", "identity")
        if int(length if length.isdigit() else 0) > self._most_bytes:
            await answer_unread(scope, receive, send, self._too_long())
            return
        if encoding.lower() != "identity":
            self._measures.refused("compressed_body")
            message = f"content-encoding is {encoding[:40]!r}; send the body as it is"
            await answer_unread(scope, receive, send, JsonBody(refusal(415, message), 415))
            return
        came, values, more = 0, 0, True
        instead: JsonBody | None = None
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal came, values, more, instead
            if not more or instead is not None:  # whoever asks again wants to know whether the client is there
                return await receive()
            try:
                async with asyncio.timeout_at(deadline + came / _SLOWEST_BYTES_PER_SECOND):
                    message = await receive()
            except TimeoutError:
                self._measures.refused("slow_body")
                instead = JsonBody(refusal(408, "the body came too slowly; send it at once"), 408)
                return {"type": "http.disconnect"}
            body = message.get("body", b"")
            came += len(body)
            values += body.count(b",") + body.count(b"[") + body.count(b"{")
            more = message.get("more_body", False)
            if came > self._most_bytes or values > _MOST_VALUES:
                instead = self._too_long()
                return {"type": "http.disconnect"}
            return message

        async def answered(message: Message) -> None:
            if instead is None:
                await send(message)

        try:
            await self._app(scope, counted, answered)
        finally:
            if instead is not None:
                await answer_unread(scope, receive, send, instead, more=more and instead.status_code != 408)

    def _too_long(self) -> JsonBody:
        self._measures.refused("long_body")
        message = f"the body has more than {self._most_bytes} bytes, or {_MOST_VALUES} values; send less at once"
        return JsonBody(refusal(413, message), 413)
