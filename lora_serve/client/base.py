"""The seam of seven methods between the web and the engine. Only ids, refs and events cross it; never tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from lora_serve.core.live import EngineView
from lora_serve.core.messages import AdapterCommand, Event, SmokeTestResult
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.queue_gate import QueueGate


class EngineClient(Protocol):
    """An engine as the doors and the web see it. All methods run on the event loop's thread."""

    @property
    def gate(self) -> QueueGate:
        """The limits of the queue: `infer` asks the gate, and callers that submit several requests ask it first."""

    @property
    def is_there(self) -> bool:
        """Whether an engine takes requests now; where it may be missing for a while, requests wait."""

    async def start(self) -> None:
        """Start the engine; returns when it takes requests (warm-up is requests)."""

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """Submit `request` at once and yield its events: PromptEvent, TokenEvent ..., then FinishEvent.

        With `pooling`: PromptEvent, PooledEvent, FinishEvent.
        An ErrorEvent is raised as its error instead of yielded. A fleet's client may say LostEvent after any of them
        and then begins again: whoever has shown some of it raises the event's error, so that it does not. Leaving the
        loop early (`aclose`) is the abort: the engine then frees the row's blocks and slot. Submitting is refused by
        the gate: QueueFullError, TenantQueueFullError.
        """

    def answered(self, request_id: str) -> None:
        """Note that the caller has all it wants of a request: leaving `infer` early is then a stop, no abort."""

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """Run a command about an adapter; returns when it is done. A SmokeTest returns its result.

        Raises AdapterUnavailableError, InvalidAdapterError.
        """

    async def stats(self) -> EngineStats:
        """A snapshot made between two steps."""

    async def watch(
        self, seen: Mapping[str, int], tenants: Collection[str] = (), *, in_full: bool = False
    ) -> list[EngineView]:
        """One look at each engine that answers soon: what it does, and did since the last look.

        `seen`: the mark of the last look, by replica. `tenants`, `in_full`: see `Watch`. Raises NotReadyError,
        EngineLostError if there is no engine.
        """

    async def stop(self) -> None:
        """End the engine; whoever still waits gets NotReadyError."""
