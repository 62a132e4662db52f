"""Operation: usage, metrics, traces, start, stop and log."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from lora_serve.core.setting_types import YEAR, SettingsGroup


class AccountingSettings(SettingsGroup):
    """The counting of tenants' limits and usage."""

    quota_without_redis: Literal["local", "refuse"] = Field(
        "local",
        description="limits per minute while --redis-url is away: local: each server counts alone; refuse: 429",
    )
    usage_flush_seconds: float = Field(
        1.0, ge=0.01, le=60, description="seconds between two writes of usage: what a crash may take"
    )
    usage_bucket_seconds: int = Field(
        3600, ge=60, le=86_400, description="seconds that one row of usage covers: how fine `from` and `to` can be"
    )
    usage_keep_days: int = Field(400, ge=1, le=10_000, description="days that usage is kept")


class ObservabilitySettings(SettingsGroup):
    """Metrics and traces of the requests."""

    metrics_tenants: int = Field(
        200, ge=0, le=10_000, description="tenants with series of their own in /metrics; the rest are added up as other"
    )
    metrics_names: Literal["auto", "open", "admin"] = Field(
        "auto",
        description="who reads tenants' and adapters' names in /metrics; auto: all while --auth is off, else the admin",
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector (OTLP over HTTP) for a trace per request; default: none"
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _is_web_url(value):
            raise ValueError("expected a URL such as http://localhost:4318/v1/traces")
        return value


def _is_web_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:
        return False


class OperationSettings(SettingsGroup):
    """Start, stop and log."""

    shutdown_timeout: float = Field(
        30.0, ge=0, le=YEAR, description="seconds that running requests may take to end after SIGTERM; then exit code 4"
    )
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1, description="seed of unseeded requests' sampling")
    log_format: Literal["console", "json"] = Field("console", description="form of the log on standard error")
    config: Path | None = Field(None, description="YAML file with any of these settings")
