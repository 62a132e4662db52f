"""--engine process: model and engine in a child, which is started again when it crashes or hangs. No torch here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from lora_serve.adapters.storage import AdapterStorage
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.client.process import EngineProcess, ProcessEngineClient, configure_of
from lora_serve.client.verifier import remote_verifier
from lora_serve.core.config import EngineConfig
from lora_serve.core.messages import WarmUpDone
from lora_serve.core.settings import Settings
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine_host.hosts import EngineHost, LoadedEngine
from lora_serve.engine_host.remote_blobs import BlobServer
from lora_serve.text.tokenizer import TextModel

COMMAND = (sys.executable, "-m", "lora_serve.engine_host.child")


def use_one_core() -> None:
    """Does nothing: no thread of this process computes in parallel."""


@asynccontextmanager
async def open_host(
    settings: Settings, storage: AdapterStorage, text: Callable[[], TextModel], command: Sequence[str] = COMMAND
) -> AsyncIterator[EngineHost]:
    """See `EngineHostModule`. `command`: what to start, with the number of a socket as its last argument."""
    configure, blobs = configure_of(settings), StoredBlobs(storage.store, storage.disk)
    scratch, timeout = settings.store / "tmp", settings.adapter_load_timeout
    blob_server = BlobServer(blobs, settings.adapter_load_threads, scratch, timeout)
    client = ProcessEngineClient(
        lambda: EngineProcess.start(command, configure),
        QueueGate(settings.part(EngineConfig).queue),
        DesiredState(settings.max_loras),
        blob_server.run,
        blob_server.drop,
    )
    try:
        with suppress(OSError):  # `load` tries again
            await client.spawn()
        yield ProcessHost(client)
    finally:
        await client.stop()
        await blob_server.close()


class ProcessHost(EngineHost):
    """A child's engine."""

    can_restart = True

    def __init__(self, client: ProcessEngineClient) -> None:
        self._client = client

    async def load(self) -> LoadedEngine:
        return LoadedEngine(await self._client.load(), self._client, remote_verifier(self._client))

    def warm_up_done(self) -> None:
        self._client.tell(WarmUpDone())

    async def ping(self) -> None:
        await self._client.ping()

    async def lost(self) -> str:
        return await self._client.lost()

    def kill(self, reason: str) -> None:
        self._client.kill(reason)
