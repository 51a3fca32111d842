"""guarded(): an application behind everything that a request has to pass, in its order."""

from starlette.types import ASGIApp

from ..config import MESSAGE_BYTES
from ..gate import Gate
from ..measures import Measures
from .body_limit import BodyLimit
from .gate import HttpGate
from .host_check import HostCheck
from .request_id import RequestId


def guarded(app: ASGIApp, gate: Gate, measures: Measures, *, local: bool) -> ASGIApp:
    """Nothing of a body is read before its sender is let in. `local`: only this host's own names are answered to."""
    app = HttpGate(BodyLimit(app, measures, MESSAGE_BYTES), gate)
    if local:
        app = HostCheck(app, measures)
    return RequestId(app)
