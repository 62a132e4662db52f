"""Traces by OpenTelemetry, sent as OTLP over HTTP: a span per request, with children for the parts of its time.

Names of attributes are those of the semantic conventions for HTTP servers and for generative AI; what these have no
name for begins with `lora_serve.`. Needs the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lora_serve import __version__
from lora_serve.server.telemetry.tracing import RequestOutcome

EXPORT_SECONDS = 5.0  # for one attempt to hand over spans
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/classify": "classify",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
}


def exporter_for(endpoint: str) -> SpanExporter:
    """An exporter to the URL of --otlp-traces-endpoint; one without a path gets OTLP's own, /v1/traces."""
    parts = urlsplit(endpoint)
    url = endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS)


class OtelTraces:
    """See RequestTraces. Spans leave on a thread of their own; when the collector is away they are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        own = Resource({"service.name": "lora-serve", "service.version": __version__})
        # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER of the environment are followed.
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lora_serve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, route: str, headers: Mapping[str, str]) -> OtelSpan:
        """See RequestTraces. Follows the caller's `traceparent` (W3C Trace Context)."""
        started = time.time_ns()
        span = self._tracer.start_span(
            f"{method} {route}".strip(),
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
            start_time=started,
        )
        return OtelSpan(self._tracer, span, route, started)

    def close(self) -> None:
        self._provider.shutdown()


class OtelSpan:
    """See RequestSpan."""

    def __init__(self, tracer: Tracer, span: Span, route: str, started: int) -> None:
        """`started`: nanoseconds of the epoch."""
        self._tracer = tracer
        self._span = span
        self._route = route
        self._started = started
        self._clock = time.monotonic_ns()

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)

    def end(self, outcome: RequestOutcome) -> None:
        ended = self._started + time.monotonic_ns() - self._clock
        if self._span.is_recording():
            self._describe(outcome)
            for name, start, end in _parts(outcome, self._started, ended):
                child = self._tracer.start_span(name, set_span_in_context(self._span), start_time=start)
                child.end(end)
        self._span.end(ended)

    def _describe(self, outcome: RequestOutcome) -> None:
        span = self._span
        span.set_attribute("http.response.status_code", outcome.status)
        for name, value in outcome.fields.items():
            if isinstance(value, str) and value != "-":
                span.set_attribute(f"lora_serve.{name}", value)
        if outcome.status >= 500:
            span.set_attribute("error.type", str(outcome.status))
            span.set_status(Status(StatusCode.ERROR))
        operation = _OPERATIONS.get(self._route)
        if operation is None:
            return
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "lora_serve"})
        if outcome.model is not None:
            span.update_name(f"{operation} {outcome.model}")
            span.set_attributes({"gen_ai.request.model": outcome.model, "gen_ai.response.model": outcome.model})
            span.set_attribute("gen_ai.usage.input_tokens", outcome.num_prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", outcome.num_output_tokens)


def _parts(outcome: RequestOutcome, started: int, ended: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of the engine's stages, laid end to end and ending with the request.

    With several sequences each stage is the slowest sequence's, so that their sum may exceed the whole.
    """
    if outcome.timings is None:
        return
    timings = outcome.timings
    seconds = {
        "queue": timings.queue,
        "load": timings.load,
        "prefill": timings.prefill,
        "decode": outcome.decode or 0.0,
    }
    at = max(started, ended - int(sum(seconds.values()) * 1e9))
    for name, length in seconds.items():
        end = min(ended, at + int(length * 1e9))
        yield name, at, end
        at = end
