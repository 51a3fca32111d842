"""Tracing: the OpenTelemetry spans of one process, and W3C trace context between processes.

OpenTelemetry is optional (`pip install 'coatcheck[otel]'`) and is imported only if an endpoint is configured.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Self

from coatcheck.proto.errors import InvalidConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

Value = str | int | float | bool
# The headers of W3C trace context, which gRPC metadata has too. A trace_context is a mapping of these headers.
TRACE_CONTEXT_HEADERS: Final = ("traceparent", "tracestate")
NO_TRACE_CONTEXT: Final[Mapping[str, str]] = {}


def check_endpoint(endpoint: str | None) -> None:
    """Raise InvalidConfig if `endpoint` is no http(s) URL, or if OpenTelemetry is not installed."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"otlp-endpoint is {endpoint!r}; write the collector's gRPC address, such as http://127.0.0.1:4317"
        )
    # In this order, because find_spec raises if the parent of a module is missing.
    needed = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp.proto.grpc")
    if not all(find_spec(name) for name in needed):
        raise InvalidConfig("otlp-endpoint needs OpenTelemetry; pip install 'coatcheck[otel]', or leave it out")


class Tracing:
    """Sends the spans of one process. Create it with `Tracing.export_to`."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("coatcheck")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def export_to(cls, endpoint: str | None, service: str, instance: str) -> Self | None:
        """Send spans to the OTLP port (gRPC) of a collector, from a background thread. Return None without an endpoint.

        OTEL_TRACES_SAMPLER and OpenTelemetry's other environment variables set the sampling rate.
        """
        if endpoint is None:
            return None
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def extract_context(self, trace_context: Mapping[str, str]) -> "Context":
        """The context of the span that the headers name. Empty if the headers are missing or malformed."""
        from opentelemetry.context import Context

        return self._propagator.extract(trace_context, context=Context())

    def child_context(self, span: "Span") -> "Context":
        """The context for children of `span`."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span, Context())

    def inject_context(self, span: "Span") -> Mapping[str, str]:
        """The headers that make spans of another process children of `span`."""
        trace_context: dict[str, str] = {}
        self._propagator.inject(trace_context, context=self.child_context(span))
        return trace_context

    def start_span(self, name: str, parent: "Context", *, kind: str = "INTERNAL") -> "Span":
        """Start a span; the caller ends it."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, parent, kind=SpanKind[kind])

    def record_span(self, name: str, parent: "Context", began: int, ended: int, **attributes: Value) -> None:
        """Record a finished span. `began` and `ended`: nanoseconds since 1970."""
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=began)
        span.end(ended)

    def close(self) -> None:
        """Send the remaining spans. No span may be recorded afterwards."""
        self._provider.shutdown()
