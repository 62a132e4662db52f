"""Start, stop and log."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import YEAR


class OperationSettings(SettingsGroup):
    """Start, stop and log."""

    shutdown_timeout: float = Field(
        30.0, ge=0, le=YEAR, description="seconds that running requests may take to end after SIGTERM; then exit code 4"
    )
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1, description="seed of unseeded requests' sampling")
    log_format: Literal["console", "json"] = Field("console", description="form of the log on standard error")
    config: Path | None = Field(None, description="YAML file with any of these settings")
