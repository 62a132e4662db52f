"""What every group of settings has in common."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsGroup(BaseSettings):
    """Some of the fields of `Settings`, named like their flags with underscores and described for --help."""

    model_config = SettingsConfigDict(
        env_prefix="LORA_SERVE_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )
