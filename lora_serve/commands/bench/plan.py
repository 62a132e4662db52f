"""The plan of a load: requests and their times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `prompt`: token ids, or text; chat takes text only.

    `at`: seconds from the start; None: as soon as a user is free.
    """

    prompt: tuple[int, ...] | str
    adapter: str | None  # None: the base model
    output_tokens: int
    at: float | None = None
    num_prompt: int = 0  # tokens a text was meant to have; ids are counted

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a load. Closed loop: `concurrency` users, each sending its next request when the last one is
    answered.

    Open loop, for requests that have a time (all or none): each is sent at its time, whether or not earlier ones are
    answered; `concurrency` then caps how many are under way, None does not, and a request that waits for a place is
    late by the server's fault, not by the plan's: latencies count from the planned time.
    """

    requests: Iterable[PlannedRequest]  # iterated once per run; may be endless if `duration` is given
    concurrency: int | None = None
    duration: float | None = None  # seconds after which no more requests are sent; those under way are awaited
    cut_off: float | None = None  # seconds after which an unanswered request has failed
    warmup: tuple[PlannedRequest, ...] = ()  # sent before, as a closed loop, in no figure


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
    response_formats: tuple[Mapping[str, Any], ...] = ()  # of the requests in turn; empty: the field is not sent
    headers: Mapping[str, str] = field(default_factory=dict)  # of every request, besides the client's own
    timeout: float = 3600.0  # seconds for one answer

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")
