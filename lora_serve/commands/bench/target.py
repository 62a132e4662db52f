"""The server that gets the load, and its dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Endpoint = Literal["completions", "chat"]
AdapterField = Literal["model", "adapter_id", "header", "llama-cpp"]
UsageReports = Literal["continuous", "final", "none"]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks OpenAI's HTTP API; `url` with or without a last `/v1`.

    adapter_field: how a request names its adapter. model: as its `model`; adapter_id: a field beside `model`;
    header: X-Adapter-Id; llama-cpp: `lora: [{"id": 3, "scale": 1.0}]`, ids from `adapter_ids`, or the name if it
    is a number, and adapter 0 with scale 0 for the base model, as an empty list means the server's default.
    usage: what is asked for in `stream_options`. continuous: a count in every chunk (lora_serve, vLLM), which makes
    token times exact; final: one count at the end; none: the field is not sent.
    """

    url: str
    model: str  # the base model's name
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    adapter_field: AdapterField = "model"
    adapter_ids: Mapping[str, int] = field(default_factory=dict)
    ignore_eos: bool = True
    usage: UsageReports = "continuous"
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # of every request; wins over the client's own fields
    headers: Mapping[str, str] = field(default_factory=dict)  # of every request, besides the client's own
    timeout: float = 3600.0  # seconds for one answer

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")
