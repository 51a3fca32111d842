"""JsonBody: a response that any text can be part of, even half of a surrogate pair that a client has sent."""

import json
from typing import Any

from starlette.responses import Response


class JsonBody(Response):
    """ASCII, with everything else escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a plain value."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
