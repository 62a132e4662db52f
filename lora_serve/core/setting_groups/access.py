"""Who may ask, and how much one request may hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import Bytes, Texts


class AccessSettings(SettingsGroup):
    """Who may ask, and how much one request may hold."""

    auth: Literal["auto", "on", "off"] = Field("auto", description="tenant keys for inference; auto: off on loopback")
    admin_key: str | None = Field(
        None,
        min_length=8,
        max_length=512,
        description="bearer key of the admin API; default: made at first start, kept in the store",
    )
    tenant_source: Texts = Field(
        (), description="source (hf, https, s3, ...) from which tenants' own admins may register; repeatable"
    )
    allow_control_tokens: bool = Field(
        False, description="a control token's text in a message (a turn's end, ...) is that token; default: only text"
    )
    wrong_keys_per_minute: int = Field(
        20,
        ge=0,
        le=10**6,
        description="wrong keys from one address in a minute; more are refused with 429; 0: any number",
    )
    admin_acts_per_minute: int = Field(
        1200, ge=0, le=10**6, description="changes by one admin key in a minute, then 429; 0: any number"
    )
    tenant_acts_per_minute: int = Field(
        300,
        ge=0,
        le=10**6,
        description="changes by one key of a tenant's own admin in a minute, then 429; 0: any number",
    )
    max_body_size: Bytes = Field(
        16 * 2**20, ge=1024, description="bytes of a request body at most (uploads: --max-upload-size)"
    )
    max_upload_size: Bytes = Field(4 * 2**30, ge=1024, description="bytes of an uploaded adapter at most")

    @field_validator("admin_key")
    @classmethod
    def _check_admin_key(cls, value: str | None) -> str | None:
        if value is not None and value != value.strip():
            raise ValueError("expected a key that neither begins nor ends with a space")
        return value
