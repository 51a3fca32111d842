"""JsonBody: a response that any text can be part of, even half of a surrogate pair that a client has sent."""

import json
from typing import Any, Final

from starlette.responses import Response

LARGE_VALUES: Final = 4096  # JSON of more values is encoded in a thread


class JsonBody(Response):
    """ASCII, with everything else escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a plain value."""
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """The bytes of a plain value, as JsonBody has them."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def large_json(content: Any) -> bytes:
    """As json_bytes, encoded in small steps; to be called in a thread. json.dumps would hold the GIL throughout, a
    second for two million values."""
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
    return "".join(encoder.iterencode(content)).encode()
