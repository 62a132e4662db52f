"""--engine thread: model and engine in the server's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lora_serve.adapters.storage import AdapterStorage
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.client.thread import ThreadEngineClient
from lora_serve.client.verifier import EngineVerifier
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.settings import Settings
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine_host.hosts import EngineHost, LoadedEngine
from lora_serve.engine_host.local import LocalEngine, build_parts
from lora_serve.logs import timed
from lora_serve.model.system.threads import use_one_core
from lora_serve.text.tokenizer import TextModel

__all__ = ["ThreadHost", "open_host", "use_one_core"]


@asynccontextmanager
async def open_host(
    settings: Settings, storage: AdapterStorage, text: Callable[[], TextModel]
) -> AsyncIterator[EngineHost]:
    """See `EngineHostModule`."""
    host = ThreadHost(settings, StoredBlobs(storage.store, storage.disk), text)
    try:
        yield host
    finally:
        host.close()


class ThreadHost(EngineHost):
    """A thread cannot be ended from outside, nor a model loaded twice: a lost engine stays lost."""

    def __init__(self, settings: Settings, blobs: StoredBlobs, text: Callable[[], TextModel]) -> None:
        self._settings = settings
        self._blobs = blobs
        self._text = text
        self._local: LocalEngine | None = None
        self._client: ThreadEngineClient | None = None

    async def load(self) -> LoadedEngine:
        settings = self._settings
        configs = settings.part(EngineConfig), settings.part(AdapterConfig)
        with timed(f"model {settings.model}"):
            parts = await asyncio.to_thread(build_parts, settings.part(ModelConfig), *configs)
        local = self._local = LocalEngine(parts, *configs, self._blobs, self._text)
        client = self._client = ThreadEngineClient(
            local.engine, local.mailbox, QueueGate(configs[0].queue), local.rebuild
        )
        return LoadedEngine(local.spec, client, EngineVerifier(local.validator, client, asyncio.get_running_loop()))

    def warm_up_done(self) -> None:
        if self._local is not None:
            self._local.warm_up_done()

    async def ping(self) -> None:
        if self._client is not None:
            await self._client.ping()

    async def lost(self) -> str:
        if self._client is not None:
            await self._client.lost()
        return "the engine's thread ended"

    def close(self) -> None:
        """End the loaders, after the engine's thread has ended."""
        if self._local is not None:
            self._local.close()
