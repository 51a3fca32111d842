"""HostCheck: a server of this host alone answers to this host's names alone.

Without keys whoever can connect may ask, which on loopback is this host. But a web page of anybody's, open in a browser
on this host, may name a server whose address then becomes ours (DNS rebinding), and would read and ask what it likes.
The browser still says whose name it is. It does not know keys; where those are asked for, no page has them.
"""

import ipaddress
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coatcheck.router.http.errors import refusal
from coatcheck.router.http.json_response import JsonBody
from coatcheck.router.http.unread import answer_unread
from coatcheck.router.telemetry.request_metrics import RequestMetrics

# Names that nobody can have in the public DNS.
_OURS: Final = (".localhost", ".internal")


class HostCheck:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, measures: RequestMetrics) -> None:
        self._app = app
        self._measures = measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if is_ours(host):
            await self._app(scope, receive, send)
            return
        self._measures.refused("foreign_host")
        message = (
            f"this server answers on loopback to localhost and to addresses, not to {host[:80]!r}; call it by one of "
            "those, or have it ask for keys (--api-keys), or start it with --insecure"
        )
        await answer_unread(scope, receive, send, JsonBody(refusal(403, message), 403))


def is_ours(host: str) -> bool:
    """Whether a Host header names an address or this host; none at all is no browser's."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if not name or name == "localhost" or name.endswith(_OURS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
