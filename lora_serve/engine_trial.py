"""Tries an adapter on the running engine, for the registry (see `adapters/trial.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import Probe, ProbeResult
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.model.host_adapter import HostAdapter

_TIMEOUT = 120.0  # seconds; a probe waits for one step, one load and room in host memory


class EngineTrial:
    """Called on the registry's thread; the probe is an ordinary command to the engine, put on the event loop."""

    def __init__(
        self,
        fold: Callable[[SavedAdapter], HostAdapter],
        undo: Callable[[SavedAdapter, str], SavedAdapter],
        client: EngineClient,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._fold = fold
        self._undo = undo
        self._client = client
        self._loop = loop

    def converted(self, saved: SavedAdapter, init: str) -> SavedAdapter:
        """See `Trial.converted`."""
        return self._undo(saved, init)

    def num_bytes(self, saved: SavedAdapter) -> int:
        """See `Trial.num_bytes`."""
        return self._fold(saved).num_bytes

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        """See `Trial.probe`."""
        future = asyncio.run_coroutine_threadsafe(self._client.adapters(Probe(adapter, token_ids)), self._loop)
        try:
            result = future.result(_TIMEOUT)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise AdapterUnavailableError("The engine is too busy to try the adapter; try again.") from None
        assert result is not None, "the engine answers a probe with its result"
        return result
