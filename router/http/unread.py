"""answer_unread(): an answer to a request whose body nobody wants.

A client that is still sending reads no answer: what it sends is taken, and dropped, for as long as that may take.
"""

import asyncio
import contextlib
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_LINGER_SECONDS: Final = 5.0


async def answer_unread(scope: Scope, receive: Receive, send: Send, answer: Response, *, more: bool = True) -> None:
    """Answers, and ends the connection; `more`: whether any of the body may still come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while more:
                more = (await receive()).get("more_body", False)
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)
