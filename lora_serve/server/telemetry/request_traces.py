"""A trace per request, behind a seam: the web knows what happened to a request, not who collects it (see otel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lora_serve.core.messages import Timings


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: never what was asked, nor what was answered."""

    status: int
    model: str | None  # who answered; None: nobody
    fields: Mapping[str, object]  # as in the log: request_id, tenant, adapter, digest
    num_prompt_tokens: int
    num_output_tokens: int
    timings: Timings | None  # seconds; None: no prompt was computed
    decode: float | None  # seconds after the first token


class RequestSpan(Protocol):
    """One request under way."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, for the log."""

    def end(self, outcome: Outcome) -> None:
        """To be called once."""


class RequestTraces(Protocol):
    """Where spans begin."""

    def begin(self, method: str, route: str, headers: Mapping[str, str]) -> RequestSpan:
        """`route`: the pattern that the URL matched, empty if none. `headers` may name the caller's own trace."""

    def close(self) -> None:
        """Hand over what is not yet handed over, within seconds."""
