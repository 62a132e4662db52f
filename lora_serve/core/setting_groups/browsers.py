"""Web pages that may use the server, and the names it goes by."""

from __future__ import annotations

from pydantic import Field, field_validator

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import Texts
from lora_serve.core.web_origin import parse_name, parse_origin


class BrowserSettings(SettingsGroup):
    """Web pages that may use the server, and the names it goes by."""

    allowed_hosts: Texts = Field(
        (),
        description="names without a port under which a server that asks for no key may be called, beside its own; "
        "repeatable",
    )
    allowed_origins: Texts = Field(
        (), description="origins (https://app.example.org) of other sites' pages that may use the server; repeatable"
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if parse_name(text) is None:
                raise ValueError(f"expected a name or an address such as models.example.org, without a port: {text!r}")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if parse_origin(text) is None:
                raise ValueError(f"expected an origin such as https://app.example.org, without a path: {text!r}")
        return value
