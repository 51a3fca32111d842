"""HttpGate: lets in whoever has a key for what they ask, before any of the body is read.

It does not know keys (see router/access/authenticator.py); it knows which paths need what, and how HTTP refuses.
"""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coatcheck.proto.errors import PermissionDenied, Unauthenticated
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.tenant import Scope as Needed
from coatcheck.router.http.errors import error_body
from coatcheck.router.http.json_response import JsonBody
from coatcheck.router.http.unread import answer_unread

_OPEN: Final = {"/health", "/ping"}  # probes have no keys, and learn one word
_GENERATE: Final = ("/v1/", "/tokenize", "/detokenize", "/version")
# Browsers ask for a key when they are offered `Basic`, on a line of its own, and only where there is a page to see.
_CHALLENGES: Final = {"generate": ("Bearer",), "observe": ('Basic realm="coatcheck"', "Bearer")}


class HttpGate:
    """An ASGI application around another, which finds the tenant in its scope."""

    def __init__(self, app: ASGIApp, gate: Authenticator) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            needed: Needed = "generate" if scope["path"].startswith(_GENERATE) else "observe"
            basic = needed == "observe" and scope["method"] in ("GET", "HEAD")
            try:
                authorization = Headers(scope=scope).get("authorization")
                certificate = scope["state"].get("client_certificate") if "state" in scope else None
                scope["tenant"] = self._gate.admit(authorization, needed, basic=basic, certificate=certificate)
            except (Unauthenticated, PermissionDenied) as error:
                status, body = error_body(error)
                answer = JsonBody(body, status)
                for challenge in _CHALLENGES[needed] if status == 401 else ():
                    answer.headers.append("www-authenticate", challenge)
                await answer_unread(scope, receive, send, answer)
                return
        await self._app(scope, receive, send)
