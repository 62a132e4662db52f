"""Bodies of the admin API."""

from __future__ import annotations

from typing import Any

from lora_serve.server.schemas.fields import Fields, Name


class RegisterFields(Fields):
    """POST /admin/adapters"""

    id: Name
    source: str
    tenant: Name | None = None
    pin: bool = False
    metadata: dict[str, Any] | None = None
    allow_noop: bool = False


class LoadLoraFields(Fields):
    """POST /v1/load_lora_adapter, as vLLM has it"""

    lora_name: Name = ""
    lora_path: str = ""
    load_inplace: bool = False
    allow_noop: bool = False  # our own


class UnloadLoraFields(Fields):
    """POST /v1/unload_lora_adapter, as vLLM has it"""

    lora_name: Name = ""
