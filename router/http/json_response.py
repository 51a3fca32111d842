"""AsciiJsonResponse: JSON in ASCII. Other characters are escaped, so it can hold any text, even a lone surrogate."""

import json
from typing import Any, Final

from starlette.responses import Response

LARGE_VALUES: Final = 4096  # JSON of more values is made off the event loop


class AsciiJsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """`content` as compact ASCII JSON."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
