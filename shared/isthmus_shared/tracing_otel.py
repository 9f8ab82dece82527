"""The tracing port over OpenTelemetry's SDK. Imported only where an endpoint is configured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from isthmus_shared.tracing import HEADER, Attribute, Span, parse_traceparent

EXPORT_TIMEOUT_S = 5
"""For one batch. A collector that is away costs its spans and, at the end, this much of the process' grace."""


class OtelSpan:
    def __init__(self, span: trace.Span, to_ns: Callable[[float | None], int]) -> None:
        self._span, self._to_ns = span, to_ns
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self._ended = False

    @property
    def headers(self) -> Mapping[str, str] | None:
        return {HEADER: self.traceparent}

    def event(self, name: str, *, at_s: float | None = None, **attributes: Attribute) -> None:
        self._span.add_event(name, attributes, self._to_ns(at_s))

    def end(self, *, at_s: float | None = None, error: str = "", **attributes: Attribute) -> None:
        if self._ended:
            return
        self._ended = True
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(self._to_ns(at_s))


class OtelTracing:
    """`clock_s` gives the spans' times. It is monotonic; the calendar is read once, so no span ends before it began."""

    enabled = True

    def __init__(self, provider: TracerProvider, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._provider, self._clock_s = provider, clock_s
        self._tracer = provider.get_tracer("isthmus")
        self._epoch_ns = time.time_ns() - int(clock_s() * 1e9)

    def now_s(self) -> float:
        return self._clock_s()

    def begin(self, name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute) -> Span:
        span = self._tracer.start_span(name, _context(parent), attributes=attributes, start_time=self._to_ns(start_s))
        return OtelSpan(span, self._to_ns)

    def close(self) -> None:
        self._provider.shutdown()

    def _to_ns(self, at_s: float | None) -> int:
        return self._epoch_ns + int((self._clock_s() if at_s is None else at_s) * 1e9)


def otlp_tracing(endpoint: str, *, service: str, instance: str) -> OtelTracing:
    """Batches over OTLP/HTTP to `endpoint` + ``/v1/traces``. Sampling, headers, batch sizes: the standard variables."""
    resource = Resource.create({"service.name": f"isthmus-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracing(provider)


def _context(parent: str) -> Context:
    """Of a remote parent; an empty one for a trace of its own, whatever the ambient context is."""
    found = parse_traceparent(parent)
    if found is None:
        return Context()
    trace_id, span_id, flags = found
    remote = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())
