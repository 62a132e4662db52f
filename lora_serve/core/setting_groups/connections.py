"""How long, and how many, clients may keep connections open."""

from __future__ import annotations

from pydantic import Field

from lora_serve.core.setting_groups.group import SettingsGroup
from lora_serve.core.setting_types import YEAR, Bytes


class ConnectionSettings(SettingsGroup):
    """How long, and how many, clients may keep connections open."""

    max_connections: int = Field(
        4096, ge=16, le=2**20, description="open connections at most; beyond it the oldest idle one makes room, or 503"
    )
    max_header_size: Bytes = Field(
        8190, ge=1024, le=2**20, description="bytes of the request line, and of one header, at most"
    )
    keep_alive_timeout: float = Field(
        75.0, gt=0, le=YEAR, description="seconds after which a connection without a whole request head is closed"
    )
    body_timeout: float = Field(
        120.0,
        gt=0,
        le=YEAR,
        description="seconds that a request's body may take (an upload: each 4 KiB of it), then 408",
    )
    write_timeout: float = Field(
        60.0, gt=0, le=YEAR, description="seconds after which an answer that its reader takes nothing of is broken off"
    )
