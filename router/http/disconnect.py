"""What a client that leaves means for its request: whatever is being made for it is given up, and its blocks freed.

A server of HTTP only learns that a client is gone by asking; nothing else in this room asks.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Message, Receive

_T = TypeVar("_T")


class ClientGone(Exception):
    """There is nobody to answer."""


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of the work, which is cancelled once the client has left; raises ClientGone then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
