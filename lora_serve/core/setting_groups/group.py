"""What every group of settings has in common."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lora_serve.core.setting_texts import check_text


class SettingsGroup(BaseSettings):
    """Some of the fields of `Settings`, named like their flags with underscores and described for --help."""

    model_config = SettingsConfigDict(
        env_prefix="LORA_SERVE_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Before a value is understood as a number, a path or one of some words."""
        return check_text(value)
