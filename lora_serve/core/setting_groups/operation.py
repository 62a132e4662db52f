"""Operation: usage, metrics, traces, start, stop and log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from lora_serve.core.setting_texts import is_web_url
from lora_serve.core.setting_types import YEAR, setting


def _check_endpoint(value: str | None) -> str | None:
    if value is not None and not is_web_url(value):
        raise ValueError("expected a URL such as http://localhost:4318/v1/traces")
    return value


@dataclass(frozen=True, kw_only=True)
class AccountingConfig:
    """The counting of tenants' limits and usage."""

    quota_without_redis: Literal["local", "refuse"] = setting(
        "local", "limits per minute while --redis-url is away: local: each server counts alone; refuse: 429"
    )
    usage_flush_seconds: float = setting(
        1.0, "seconds between two writes of usage: what a crash may take", ge=0.01, le=60
    )
    usage_bucket_seconds: int = setting(
        3600, "seconds that one row of usage covers: how fine `from` and `to` can be", ge=60, le=86_400
    )
    usage_keep_days: int = setting(400, "days that usage is kept", ge=1, le=10_000)


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Names in /metrics."""

    metrics_tenants: int = setting(
        200, "tenants with series of their own in /metrics; the rest are added up as other", ge=0, le=10_000
    )
    metrics_names: Literal["auto", "open", "admin"] = setting(
        "auto", "who reads tenants' and adapters' names in /metrics; auto: all while --auth is off, else the admin"
    )


@dataclass(frozen=True, kw_only=True)
class ObservabilitySettings(MetricsSettings):
    """Metrics and traces of the requests."""

    otlp_traces_endpoint: Annotated[str | None, AfterValidator(_check_endpoint)] = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) for a trace per request; default: none"
    )


@dataclass(frozen=True, kw_only=True)
class ShutdownSettings:
    """The end of the server."""

    shutdown_timeout: float = setting(
        30.0, "seconds that running requests may take to end after SIGTERM; then exit code 4", ge=0, le=YEAR
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Requests that bring no seed."""

    seed: int = setting(0, "seed of unseeded requests' sampling", ge=-(2**63), le=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class OperationSettings(SamplingSettings, ShutdownSettings):
    """Start, stop and log."""

    log_format: Literal["console", "json"] = setting("console", "form of the log on standard error")
    config: Path | None = setting(None, "YAML file with any of these settings")
