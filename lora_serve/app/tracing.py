"""Opens the OpenTelemetry exporter, if the settings name a collector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from lora_serve.core.errors import ConfigError, how_to_install
from lora_serve.server.telemetry.tracing import RequestTraces


@contextmanager
def opened_traces(endpoint: str | None) -> Iterator[RequestTraces | None]:
    """The traces for as long as the block lasts; None without an endpoint. Raises ConfigError without the extra."""
    if endpoint is None:
        yield None
        return
    try:
        from lora_serve.app.otel import OtelTraces, exporter_for
    except ImportError:
        words = "--otlp-traces-endpoint: needs OpenTelemetry, which is not installed"
        raise ConfigError(f"{words}: {how_to_install('otel')}") from None
    with closing(OtelTraces(exporter_for(endpoint))) as traces:
        yield traces
