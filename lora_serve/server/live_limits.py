"""The tiers' limits as they are now: the settings, and what PUT /admin/engine changed since."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import asdict

from lora_serve.core.config import AdapterConfig
from lora_serve.core.messages import Resize


class LiveLimits:
    """Owned by the event loop's thread. Not kept over a restart: the settings hold again then."""

    def __init__(self) -> None:
        self._changes: dict[str, int] = {}  # by the field's name in AdapterConfig

    def change(self, command: Resize) -> None:
        """The engine has taken these in."""
        self._changes |= {name: value for name, value in asdict(command).items() if value is not None}

    def of(self, config: AdapterConfig) -> AdapterConfig:
        """The settings with the changes."""
        return replace(config, **self._changes) if self._changes else config  # type: ignore[arg-type]
