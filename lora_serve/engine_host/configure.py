"""The settings that an engine in another process is told."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.messages import Configure
from lora_serve.core.settings import Settings

# Settings of adapters that are the server's alone.
_KEPT = (
    "redis_url", "adapter_root", "adapter_url", "lora_modules", "registration_threads", "tenant_registration_seconds",
)  # fmt: skip


def configure_of(settings: Settings) -> Configure:
    """The first message to the engine's process: neither keys nor the place of anything but adapters' files."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(AdapterConfig) if field.name in _KEPT}
    adapters = replace(settings.part(AdapterConfig), **defaults)
    return Configure(settings.part(ModelConfig), settings.part(EngineConfig), adapters, settings.log_format)
