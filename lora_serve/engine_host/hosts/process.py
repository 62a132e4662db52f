"""--engine process: model and engine in a child, which is started again when it crashes or hangs. No torch here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.client.process import EngineProcess, ProcessEngineClient
from lora_serve.client.verifier import EngineVerifier, RemoteValidator
from lora_serve.core.config import EngineConfig
from lora_serve.core.messages import WarmUpDone
from lora_serve.core.settings import Settings
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine_host.configure import configure_of
from lora_serve.engine_host.hosts.base import EngineHost, LoadedEngine
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
    assert EngineProcess.shares_files, "RemoteValidator and BlobServer name adapters' files by their paths"
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


@dataclass
class ProcessHost:
    """See `EngineHost`."""

    _client: ProcessEngineClient
    can_restart: bool = True
    is_warm: bool = False

    async def load(self) -> LoadedEngine:
        """See `EngineHost.load`."""
        spec, loop = await self._client.load(), asyncio.get_running_loop()
        return LoadedEngine(spec, self._client, EngineVerifier(RemoteValidator(self._client, loop), self._client, loop))

    def warm_up_done(self) -> None:
        """See `EngineHost.warm_up_done`."""
        self._client.tell(WarmUpDone())

    async def ping(self) -> None:
        """See `EngineHost.ping`."""
        await self._client.ping()

    async def lost(self) -> str:
        """See `EngineHost.lost`."""
        return await self._client.lost()

    def kill(self, reason: str) -> None:
        """See `EngineHost.kill`."""
        self._client.kill(reason)
