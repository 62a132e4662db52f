"""The map of the engine: everything that can reach its loop, through one mailbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.loading.loader import LoadFinished
from lora_serve.core.errors import LoraServeError
from lora_serve.core.messages import AdapterCommand, SmokeTestResult
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats

Outcome = LoraServeError | SmokeTestResult | None


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request; answered by events."""

    request: InferenceRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """The client left; unknown ids are fine, they ended meanwhile."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command about an adapter; `reply` is called once when it is done: None, a smoke test's result, or the error."""

    command: AdapterCommand
    reply: Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """`reply` is called with a snapshot made between two steps."""

    reply: Callable[[EngineStats], None]


@dataclass(frozen=True, slots=True)
class Ping:
    """`reply` is called between two steps: the engine gets on."""

    reply: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; whoever still waits gets NotReadyError."""


Message = Submit | Abort | Command | StatsQuery | Ping | Stop | LoadFinished[Any]
