"""Traces: sent as OTLP over a real socket to a collector in the test, or kept in the SDK's own memory."""

from __future__ import annotations

import asyncio
import builtins
import gzip
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lora_serve.app.launch import opened_traces
from lora_serve.app.otel import OtelTraces, exporter_for
from lora_serve.core.errors import ConfigError, NumericalError
from lora_serve.server.services import Services
from tests.http_thread import serving
from tests.mock_engine import MockReply
from tests.server.conftest import leave_in_the_middle

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def services(services: Services, exporter: InMemorySpanExporter) -> AsyncIterator[Services]:
    traces = OtelTraces(exporter)
    yield replace(services, traces=traces)
    traces.close()


@pytest.fixture
def spans(house: Any, exporter: InMemorySpanExporter) -> Any:
    """spans() -> those that ended, in the order of their starts."""

    def of_now() -> list[ReadableSpan]:
        house.services.traces._provider.force_flush()
        return sorted(
            exporter.get_finished_spans(), key=lambda span: (span.start_time, span.kind is not SpanKind.SERVER)
        )

    return of_now


async def ask(http: aiohttp.ClientSession, headers: dict[str, str] | None = None, **body: Any) -> int:
    body = {"model": "acme/a", "prompt": [1, 2, 3], "max_tokens": 2, **body}
    async with http.post("/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_request_is_a_span_in_the_callers_trace_with_the_conventions_names(
    http: aiohttp.ClientSession, house: Any, spans: Any
) -> None:
    await house.register("acme/a")
    assert await ask(http, SAMPLED) == 200
    whole, *parts = spans()
    assert whole.name == "text_completion acme/a"
    assert whole.kind is SpanKind.SERVER
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lora_serve",
        "gen_ai.request.model": "acme/a",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "lora_serve.tenant": "default",
        "lora_serve.adapter": "acme/a@1",
    }
    assert {name: whole.attributes.get(name) for name in wanted} == wanted
    assert whole.attributes["lora_serve.digest"].startswith("sha256:")
    assert [part.name for part in parts] == ["queue", "load", "prefill", "decode"]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert times == sorted(times)
    assert whole.start_time <= times[0]
    assert times[-1] <= whole.end_time


async def test_without_a_callers_trace_a_new_one_begins_and_its_id_is_in_the_log(
    http: aiohttp.ClientSession, house: Any, spans: Any
) -> None:
    from lora_serve.logs.pipeline import Redaction, line_formatter

    await house.register("acme/a")
    lines: list[str] = []
    handler = logging.Handler()
    formatter = line_formatter("json", Redaction())
    handler.emit = lambda record: lines.append(formatter.format(record))  # type: ignore[method-assign]
    access, level = logging.getLogger("lora_serve.access"), logging.getLogger("lora_serve.access").level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        assert await ask(http, {"traceparent": "nonsense"}) == 200
    finally:
        access.removeHandler(handler)
        access.setLevel(level)
    whole = spans()[0]
    assert whole.parent is None
    assert f'"trace_id": "{whole.context.trace_id:032x}"' in lines[0]


async def test_caller_who_does_not_sample_is_followed(http: aiohttp.ClientSession, house: Any, spans: Any) -> None:
    await house.register("acme/a")
    assert await ask(http, {"traceparent": f"00-{TRACE}-{PARENT}-00"}) == 200
    assert spans() == []


async def test_errors_and_callers_who_leave_end_their_spans_too(
    http: aiohttp.ClientSession, house: Any, spans: Any
) -> None:
    assert await ask(http) == 404
    house.engine.script = lambda request: MockReply(error=NumericalError("x"))
    assert await ask(http, model="tiny-base") == 500
    house.engine.script = lambda request: MockReply(gate=asyncio.Event())
    await leave_in_the_middle(http, house)
    async with asyncio.timeout(60):
        while len(found := [span for span in spans() if span.kind is SpanKind.SERVER]) < 3:
            await asyncio.sleep(0.01)
    assert [span.attributes["http.response.status_code"] for span in found] == [404, 500, 499]
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET]


async def test_probes_are_not_traced_and_urls_only_by_their_pattern(http: aiohttp.ClientSession, spans: Any) -> None:
    for path in ("/health", "/metrics", "/v1/models/acme/secret-project", "/nowhere/secret"):
        async with http.get(path):
            pass
    names = [span.name for span in spans()]
    assert names == ["GET /v1/models/{id}", "GET"]
    assert "secret" not in str([dict(span.attributes) for span in spans()])


async def test_no_prompt_no_answer_and_no_key_is_in_a_trace(
    http: aiohttp.ClientSession, house: Any, spans: Any
) -> None:
    await house.register("acme/a")
    await ask(http, {"Authorization": "Bearer hush-hush", **SAMPLED}, prompt="hush-hush", user="hush-hush")
    assert spans()
    assert "hush-hush" not in "".join(span.to_json() for span in spans())


def test_spans_reach_a_collector_as_otlp_over_http() -> None:
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        unpacked = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        received.append(ExportTraceServiceRequest.FromString(unpacked))
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    with serving(app) as url, opened_traces(url) as traces:
        assert traces is not None
        span = traces.begin("GET", "/v1/models", SAMPLED)
        span.end(outcome_of(200))
        trace_id = span.trace_id
        traces.close()
    (resource,) = received[0].resource_spans
    (sent,) = resource.scope_spans[0].spans
    assert (sent.name, sent.trace_id.hex(), sent.parent_span_id.hex()) == ("GET /v1/models", trace_id, PARENT)
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "lora-serve"


def test_the_path_of_an_endpoint_is_kept_and_a_missing_one_is_otlps() -> None:
    assert exporter_for("http://localhost:4318")._endpoint == "http://localhost:4318/v1/traces"  # type: ignore[attr-defined]
    assert exporter_for("http://localhost:4318/x/y")._endpoint == "http://localhost:4318/x/y"  # type: ignore[attr-defined]


def test_no_endpoint_no_traces() -> None:
    with opened_traces(None) as traces:
        assert traces is None


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    found = builtins.__import__

    def without_opentelemetry(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return found(name, *arguments, **more)

    monkeypatch.delitem(sys.modules, "lora_serve.app.otel")
    monkeypatch.setattr(builtins, "__import__", without_opentelemetry)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .*lora-serve\[otel\]"), opened_traces("http://x"):
        pass


def outcome_of(status: int) -> Any:
    from lora_serve.server.telemetry.tracing import RequestOutcome

    return RequestOutcome(status, None, {"tenant": "-"}, 0, 0, None, None)
