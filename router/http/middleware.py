"""guarded(): an application behind everything that a request has to pass, in its order."""

from starlette.types import ASGIApp

from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.config import MESSAGE_BYTES
from coatcheck.router.http.body_limit import BodyLimit
from coatcheck.router.http.host_check import HostCheck
from coatcheck.router.http.http_gate import HttpGate
from coatcheck.router.http.request_id import RequestId
from coatcheck.router.telemetry.request_metrics import RequestMetrics


def guarded(app: ASGIApp, gate: Authenticator, measures: RequestMetrics, *, local: bool) -> ASGIApp:
    """Nothing of a body is read before its sender is let in. `local`: only this host's own names are answered to."""
    app = HttpGate(BodyLimit(app, measures, MESSAGE_BYTES), gate)
    if local:
        app = HostCheck(app, measures)
    return RequestId(app)
