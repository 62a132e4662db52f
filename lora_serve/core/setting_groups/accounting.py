"""How tenants' limits and usage are counted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup


class AccountingSettings(SettingsGroup):
    """How tenants' limits and usage are counted."""

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
