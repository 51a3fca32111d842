"""JsonBody: a response that any text can be part of, even half of a surrogate pair that a client has sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from starlette.responses import Response

LARGE_VALUES: Final = 4096  # JSON of more values is encoded in a thread


class JsonBody(Response):
    """ASCII, with everything else escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a plain value."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def large_json(content: Any) -> bytes:
    """As JsonBody.render, in small steps that release the GIL; call it in a thread. json.dumps would hold the GIL for a
    second at two million values."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    return "".join(encoder.iterencode(content)).encode()


async def json_answer(make: Callable[[], Any], values: int) -> Response:
    """A response whose JSON is the value that `make` returns. `values`: the approximate number of values in that JSON;
    above LARGE_VALUES a thread makes it."""
    if values <= LARGE_VALUES:
        return JsonBody(make())
    return Response(await asyncio.to_thread(lambda: large_json(make())), media_type=JsonBody.media_type)
