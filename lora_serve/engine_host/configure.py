"""The settings that an engine in another process is told."""

from __future__ import annotations

from dataclasses import replace

from lora_serve.core.messages import Configure
from lora_serve.core.settings import Settings


def configure_of(settings: Settings) -> Configure:
    """The first message to the engine's process: neither keys nor the place of anything but adapters' files."""
    adapters = replace(settings.adapter_slice(), redis_url=None, roots=(), urls=())
    return Configure(settings.model_slice(), settings.engine_slice(), adapters, settings.log_format)
