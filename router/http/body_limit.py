"""BodyLimit: a request's body may have so many bytes, whether its client says how many there are or not."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .error_body import refusal
from .json_body import JsonBody
from .unread import answer_unread


class BodyLimit:
    """An ASGI application around another. What is too long is refused before it is read, or as soon as it shows."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(length if length.isdigit() else 0) > self._most_bytes:
            await self._refuse(scope, receive, send, more=True)
            return
        came, over, more = 0, False, True

        async def counted() -> Message:
            nonlocal came, over, more
            message = await receive()
            came += len(message.get("body", b""))
            more = message.get("more_body", False)
            if came > self._most_bytes:
                over = True
                return {"type": "http.disconnect"}
            return message

        async def answered(message: Message) -> None:
            if not over:
                await send(message)

        try:
            await self._app(scope, counted, answered)
        finally:
            if over:
                await self._refuse(scope, receive, send, more)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, more: bool) -> None:
        message = f"the body has more than {self._most_bytes} bytes; send less at once"
        await answer_unread(scope, receive, send, JsonBody(refusal(413, message), 413), more=more)
