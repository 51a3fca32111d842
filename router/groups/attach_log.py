"""AttachLog: logs why a router cannot attach to a group, each cause once and not at each attempt.

A router attempts to attach again and again, up to ten times a second. Without a line in its log an operator sees only
requests that wait.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Final

# A group that dies, or that starts again, refuses connections until the supervisor's next list says so.
_GRACE_SECONDS: Final = 5.0
_REPEAT_SECONDS: Final = 300.0  # between two lines about one cause
_MAX_CAUSES: Final = 16

# A pattern in the reason of a failure, and what to check. The first pattern that occurs counts.
_CHECKS: Final = (
    (
        r"CERTIFICATE_VERIFY|certificate verify",
        "the group's certificate is not one of this cluster: check that no other cluster's group listens at {address}",
    ),
    (
        r"handshake|SSL",
        "the TLS handshake failed: check that router and group are of one cluster and were started with one set of TLS "
        "options (--api-keys, --tls-cert, --ray-address)",
    ),
    (
        r"resol|lookup",
        "check that the router's host can resolve the name in {address}",
    ),
    (
        r"[Rr]efused",
        "no process listens at {address}: check with `coatcheck status` whether the group runs, and its rank 0's log "
        "with `coatcheck logs`",
    ),
    (
        r"[Tt]imed? ?out|imeout|unreachable|No route|DEADLINE_EXCEEDED|host is down",
        "check that the network lets the router's host reach {address} (firewall, network policy, routes)",
    ),
    (
        r"UNIMPLEMENTED|HTTP/2|http1|http2",
        "what listens at {address} is no group: check which program has the port",
    ),
    (
        r"ocket closed|onnection reset|roken pipe|ended the stream",
        "{address} accepts connections and closes them: check rank 0's log with `coatcheck logs`, and that router and "
        "group both use TLS or neither does",
    ),
)
_OTHER_CHECK: Final = "check the log of the group's rank 0 with `coatcheck logs`"

_log = logging.getLogger(__name__)


class AttachLog:
    """The log lines about one group's connection. A cause that continues is logged again after five minutes."""

    def __init__(self, group: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._clock = clock
        self._failures = 0  # attempts to attach in a row that failed
        self._failing_since = 0.0
        self._has_logged = False  # about the present failures
        self._logged_at: dict[str, float] = {}  # cause -> time of its last line

    def record_failure(self, address: str, reason: str) -> None:
        """An attempt to attach has failed. Logs a warning once attempts have failed for five seconds."""
        now = self._clock()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if now - self._failing_since < _GRACE_SECONDS or not self._is_due(re.sub(r"\d+", "", reason), now):
            return
        self._has_logged = True
        _log.warning(
            "group %s: this router cannot attach to it at %s (%d attempts in %.0f s): %s; %s",
            self._group,
            address,
            self._failures,
            now - self._failing_since,
            reason,
            what_to_check(reason).format(address=address),
        )

    def record_attached(self) -> None:
        """The group has registered."""
        if self._has_logged:
            seconds = self._clock() - self._failing_since
            _log.warning("group %s is attached, after %d failures in %.0f s", self._group, self._failures, seconds)
        self._failures, self._has_logged = 0, False

    def record_ejection(self, reason: str, cause: BaseException | None = None) -> None:
        """The group is ejected. Logs the first ejection for a reason at once. `cause`: the router's own error, if one
        is the reason; its traceback is logged."""
        if self._is_due(reason, self._clock()):
            _log.error("group %s is ejected: %s", self._group, reason, exc_info=cause)

    def _is_due(self, cause: str, now: float) -> bool:
        logged_at = self._logged_at.get(cause)
        if logged_at is not None and now - logged_at < _REPEAT_SECONDS:
            return False
        self._logged_at.pop(cause, None)
        if len(self._logged_at) >= _MAX_CAUSES:
            del self._logged_at[next(iter(self._logged_at))]  # the one that was logged first
        self._logged_at[cause] = now
        return True


def what_to_check(reason: str) -> str:
    """What an operator should check after an attempt that failed for `reason`. The text has `{address}` in place of the
    group's address."""
    return next((check for pattern, check in _CHECKS if re.search(pattern, reason)), _OTHER_CHECK)
