"""JsonBody: a response that any text can be part of, even half of a surrogate pair that a client has sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from starlette.responses import Response

LARGE_VALUES: Final = 4096  # the event loop has no time to encode more


class JsonBody(Response):
    """ASCII, with everything else escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a plain value."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def large_json(content: Any) -> bytes:
    """The bytes of JsonBody, encoded in small steps; to be called in a thread. json.dumps would hold the GIL
    throughout, a second for two million values."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    return "".join(encoder.iterencode(content)).encode()


async def json_answer(make: Callable[[], Any], values: int) -> Response:
    """A response of what `make` returns. If that has many `values`, about so many, a thread makes it."""
    if values <= LARGE_VALUES:
        return JsonBody(make())
    return Response(await asyncio.to_thread(lambda: large_json(make())), media_type=JsonBody.media_type)
