"""Tracing: OpenTelemetry's spans of one process, with W3C trace context as it crosses processes.

Optional: it needs `pip install 'coatcheck[otel]'`, imports it only when somebody traces, and whoever does not has no
Tracing at all. It does not know what spans are of.
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
# The headers, and the gRPC metadata, of W3C trace context.
CARRIED: Final = ("traceparent", "tracestate")
NO_PARENT: Final[Mapping[str, str]] = {}


def check_endpoint(endpoint: str | None) -> None:
    """Raises InvalidConfig for what spans cannot be sent to, or when the libraries are missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(
            f"otlp-endpoint is {endpoint!r}; write the collector's gRPC address, such as http://127.0.0.1:4317"
        )
    # The parents first: asking for a module below one that is missing raises.
    needed = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp.proto.grpc")
    if not all(find_spec(name) for name in needed):
        raise InvalidConfig("otlp-endpoint needs OpenTelemetry; pip install 'coatcheck[otel]', or leave it out")


class Tracing:
    """Made from a provider, or by `to`; `close` sends what is left."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("coatcheck")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str | None, service: str, instance: str) -> Self | None:
        """Spans go to a collector's OTLP port (gRPC), from a thread of their own; None without an endpoint. How many
        of them, OpenTelemetry's own variables say (OTEL_TRACES_SAMPLER)."""
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

    def parent(self, carrier: Mapping[str, str]) -> "Context":
        """Whose span the carrier names; an empty context when it names none, or is malformed."""
        from opentelemetry.context import Context

        return self._propagator.extract(carrier, context=Context())

    def below(self, span: "Span") -> "Context":
        """For spans that are parts of this one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span, Context())

    def carrier(self, span: "Span") -> Mapping[str, str]:
        """What another process needs to make its spans parts of this one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self.below(span))
        return carrier

    def start(self, name: str, parent: "Context", *, kind: str = "INTERNAL", at: int | None = None) -> "Span":
        """A span that somebody will end; `at` is in nanoseconds since 1970."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(name, parent, kind=SpanKind[kind], start_time=at)

    def record(self, name: str, parent: "Context", began: int, ended: int, **attributes: Value) -> None:
        """A span that is already over."""
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=began)
        span.end(ended)

    def close(self) -> None:
        """Sends what is left; nothing may be recorded after it."""
        self._provider.shutdown()
