"""Bodies of the admin API."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from lora_serve.server.schemas.fields import Bytes, Fields, Name

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]  # of a version, as its card has it
Version = Annotated[int, Field(ge=1)]


class RegisterFields(Fields):
    """POST /admin/adapters"""

    id: Name
    source: str
    tenant: Name | None = None
    pin: bool = False
    metadata: dict[str, Any] | None = None
    allow_noop: bool = False
    activate: bool = True  # the bare id means this version from now on
    digest: Digest | None = None  # that the version must come to have; any other content is refused


class CanaryFields(Fields):
    """Of RouteFields."""

    version: Version
    percent: float = Field(ge=0, le=100)


class RouteFields(Fields):
    """PUT /admin/adapters/{id}/route"""

    version: Version | None = None
    canary: CanaryFields | None = None


class AliasFields(Fields):
    """PUT /admin/aliases/{alias}"""

    target: Name


class LimitFields(Fields):
    """PUT /admin/engine; what is left out stays as it is. Named as the flags are; 0 turns a target off, as null does"""

    max_loras: Annotated[int, Field(ge=1, le=4096)] | None = None
    adapter_memory: Bytes | None = None
    adapter_host_memory: Bytes | None = None
    max_cpu_loras: Annotated[int, Field(ge=1, le=10**9)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=2**24)] | None = None
    batch_wait_ms: Annotated[float, Field(ge=0, le=60_000)] | None = None
    preferred_batch_size: Annotated[int, Field(ge=0, le=2**24)] | None = None
    latency_target_ms: Annotated[float, Field(ge=0, le=1e9)] | None = None
    inter_token_target_ms: Annotated[float, Field(ge=0, le=1e9)] | None = None


class LoadLoraFields(Fields):
    """POST /v1/load_lora_adapter, as vLLM has it"""

    lora_name: Name = ""
    lora_path: str = ""
    load_inplace: bool = False
    allow_noop: bool = False  # our own


class UnloadLoraFields(Fields):
    """POST /v1/unload_lora_adapter, as vLLM has it"""

    lora_name: Name = ""
