"""Tries an adapter on the running engine, for the registry (see `adapters/trial.py`). No torch."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from typing import Protocol

from lora_serve.adapters.trial import AdapterSize, Candidate
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import Probe, ProbeResult

_TIMEOUT = 120.0  # seconds; a probe waits for one step, one load and room in host memory


class Examiner(Protocol):
    """What a trial needs beside the engine; called on the registry's threads."""

    def make_plain(self, candidate: Candidate) -> None:
        """See `Trial.make_plain`."""

    def weigh(self, candidate: Candidate, *, allow_noop: bool) -> AdapterSize:
        """See `Trial.weigh`. What was made ready is kept at hand for the probe's load."""

    def forget(self) -> None:
        """Keep nothing at hand: an adapter was tried."""


class EngineTrial:
    """Called on the registry's threads; the probe is an ordinary command to the engine, put on the event loop."""

    def __init__(self, examiner: Examiner, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._examiner = examiner
        self._client = client
        self._loop = loop

    def make_plain(self, candidate: Candidate) -> None:
        """See `Trial.make_plain`."""
        self._examiner.make_plain(candidate)

    def weigh(self, candidate: Candidate, *, allow_noop: bool) -> AdapterSize:
        """See `Trial.weigh`."""
        return self._examiner.weigh(candidate, allow_noop=allow_noop)

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        """See `Trial.probe`."""
        future = asyncio.run_coroutine_threadsafe(self._client.adapters(Probe(adapter, token_ids)), self._loop)
        try:
            result = future.result(_TIMEOUT)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise AdapterUnavailableError("The engine is too busy to try the adapter; try again.") from None
        finally:
            self._examiner.forget()
        assert result is not None, "the engine answers a probe with its result"
        return result
