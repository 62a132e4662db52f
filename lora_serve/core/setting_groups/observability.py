"""What is told of the requests, and to whom."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from lora_serve.core.setting_groups.group import SettingsGroup


class ObservabilitySettings(SettingsGroup):
    """What is told of the requests, and to whom."""

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
