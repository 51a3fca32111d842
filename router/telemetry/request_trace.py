"""RequestTrace: one request's spans in this router: the whole of it, and its parts one after another.

    router.request ─ router.admission, router.queue, router.route, group.submit (again for each group that it moved to)

The group's own spans are parts of its group.submit. It does not know what happens in a part.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coatcheck.proto.tracing import Tracing, Value

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestTrace:
    """Made when the request arrives, with the client's trace context; `end` once."""

    def __init__(self, tracing: Tracing, carrier: Mapping[str, str]) -> None:
        self._tracing = tracing
        self._whole = tracing.start("router.request", tracing.parent(carrier), kind="SERVER")
        self._part: Span | None = None

    def enter(self, name: str, kind: str = "INTERNAL", **attributes: Value) -> None:
        """The next part begins where the last one ends."""
        self.leave()
        self._part = self._tracing.start(name, self._tracing.below(self._whole), kind=kind)
        self._part.set_attributes(attributes)

    def note(self, **attributes: Value) -> None:
        """Of the part under way."""
        if self._part is not None:
            self._part.set_attributes(attributes)

    def leave(self, failure: str = "") -> None:
        """The part under way is over."""
        if self._part is not None:
            if failure:
                _fail(self._part, failure)
            self._part.end()
            self._part = None

    def carrier(self) -> Mapping[str, str]:
        """For whoever works on the part under way in another process."""
        return self._tracing.carrier(self._part or self._whole)

    def end(self, failure: str = "", **attributes: Value) -> None:
        """The request is over."""
        self.leave(failure)
        self._whole.set_attributes(attributes)
        if failure:
            _fail(self._whole, failure)
        self._whole.end()


def _fail(span: "Span", why: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, why)
