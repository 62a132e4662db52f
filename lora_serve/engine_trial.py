"""Tries an adapter on the running engine, for the registry (see `adapters/trial.py`)."""

from __future__ import annotations

import asyncio
import dataclasses
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
        at_hand: AdaptersAtHand | None = None,
    ) -> None:
        """`at_hand`: where the loader finds what was folded already; None: it reads the files again."""
        self._at_hand = at_hand or AdaptersAtHand()
        self._fold = fold
        self._undo = undo
        self._client = client
        self._loop = loop

    def converted(self, saved: SavedAdapter, init: str) -> SavedAdapter:
        """See `Trial.converted`."""
        return self._undo(saved, init)

    def num_bytes(self, saved: SavedAdapter) -> int:
        """See `Trial.num_bytes`."""
        folded = self._fold(saved)
        self._at_hand.put(folded)
        return folded.num_bytes

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        """See `Trial.probe`."""
        future = asyncio.run_coroutine_threadsafe(self._client.adapters(Probe(adapter, token_ids)), self._loop)
        try:
            result = future.result(_TIMEOUT)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise AdapterUnavailableError("The engine is too busy to try the adapter; try again.") from None
        finally:
            self._at_hand.clear()
        assert result is not None, "the engine answers a probe with its result"
        return result


class AdaptersAtHand:
    """The adapter that is being registered, as it was folded from the very files whose digest it bears.

    One at most: put by the registry's thread, taken by a loader's.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, HostAdapter] = {}

    def put(self, adapter: HostAdapter) -> None:
        """In place of any other. Left out: what a load would make differently, of the rank that a card names."""
        self.clear()
        if adapter.is_plain:
            self._adapters[adapter.digest] = adapter

    def take(self, adapter: AdapterRef) -> HostAdapter | None:
        """It is gone afterwards: whoever took it holds its memory alone."""
        found = self._adapters.pop(adapter.digest, None)
        return None if found is None else dataclasses.replace(found, name=adapter.name)

    def clear(self) -> None:
        self._adapters.clear()
