"""while_connected(): cancels the work for a request when its client disconnects, so that its blocks are freed.

An ASGI application learns of a disconnect only by awaiting `receive`.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientDisconnected(Exception):
    """The client has disconnected, so no response is sent."""


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnected if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
