"""--engine process: model and engine in a child, which is started again when it crashes or hangs. No torch here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.client.engine_process import EngineProcess
from lora_serve.client.process import ProcessEngineClient
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import (
    AdapterSize,
    Configure,
    Convert,
    EngineCall,
    ForgetStaged,
    ReplyValue,
    Validate,
    WarmUpDone,
)
from lora_serve.core.settings import Settings
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine_host.base import EngineHost, HostedModel
from lora_serve.engine_host.blob_server import BlobServer
from lora_serve.engine_host.verifier import EngineVerifier

COMMAND = (sys.executable, "-m", "lora_serve.engine_host.child")


def use_one_core() -> None:
    """Nothing in this process computes in parallel."""


@asynccontextmanager
async def open_host(
    settings: Settings, storage: AdapterStorage, command: Sequence[str] = COMMAND
) -> AsyncIterator[EngineHost]:
    """See `HostModule`. `command`: what to start, with the number of a socket as its last argument."""
    configure, blobs = configure_of(settings), StoredBlobs(storage.store, storage.disk)
    scratch, term = settings.store / "tmp", settings.adapter_load_timeout
    blob_server = BlobServer(blobs, settings.adapter_load_threads, scratch, term)
    client = ProcessEngineClient(
        lambda: EngineProcess.start(command, configure),
        QueueGate(settings.engine_slice().queue),
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


def configure_of(settings: Settings) -> Configure:
    """The first message to the engine's process: neither keys nor the place of anything but adapters' files."""
    adapters = replace(settings.adapter_slice(), redis_url=None, roots=(), urls=())
    return Configure(settings.model_slice(), settings.engine_slice(), adapters, settings.log_format)


class ProcessHost:
    """See `EngineHost`."""

    can_restart = True

    def __init__(self, client: ProcessEngineClient) -> None:
        self._client = client

    async def load(self) -> HostedModel:
        """See `EngineHost.load`."""
        spec, loop = await self._client.load(), asyncio.get_running_loop()
        return HostedModel(spec, self._client, EngineVerifier(RemoteValidator(self._client, loop), self._client, loop))

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


class RemoteValidator:
    """See `WeightsValidator`: the engine's process reads the staged's folder, so both must see the same files."""

    def __init__(self, client: ProcessEngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def convert(self, staged: StagedAdapter) -> None:
        """See `AdapterVerifier.convert`."""
        folder, digest = staged.folder.absolute(), staged.artifact.digest
        self._call(lambda call_id: Convert(call_id, folder, digest, staged.max_rank, staged.budget.left))

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """See `AdapterVerifier.validate`."""
        folder, digest, budget = staged.folder.absolute(), staged.artifact.digest, staged.budget
        size = self._call(lambda call_id: Validate(call_id, folder, digest, staged.max_rank, allow_noop, budget.left))
        assert isinstance(size, AdapterSize)
        return size

    def forget(self) -> None:
        """See `WeightsValidator.forget`."""
        self._loop.call_soon_threadsafe(self._client.tell, ForgetStaged())

    def _call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """On a registry's thread. However long it takes: the engine's end, if it comes to that, ends the wait."""
        try:
            return asyncio.run_coroutine_threadsafe(self._client.call(message), self._loop).result()
        except CancelledError:
            raise AdapterUnavailableError("The server is shutting down.") from None
