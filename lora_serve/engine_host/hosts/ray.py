"""--engine ray: engines on a Ray cluster, replicas of a Serve application, behind this server's web. No torch here."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lora_serve.adapters.loading.blobs import StoredBlobs
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.client.ray.attached import LinkUsers
from lora_serve.client.ray.client import RayEngineClient
from lora_serve.client.verifier import EngineVerifier, RemoteValidator
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.blobs import FleetBlobs
from lora_serve.engine_host.fleet.cluster import Cluster, open_cluster
from lora_serve.engine_host.fleet.model_files import check_model_files
from lora_serve.engine_host.hosts.base import EngineHost, LoadedEngine

if TYPE_CHECKING:
    from lora_serve.text.tokenizer import TextModel

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0


def use_one_core() -> None:
    """Does nothing: no thread of this process computes in parallel."""


@asynccontextmanager
async def open_host(
    settings: Settings, storage: AdapterStorage, text: Callable[[], TextModel]
) -> AsyncIterator[EngineHost]:
    """See `EngineHostModule`. Raises ModelError before Ray is started for a model that cannot be loaded."""
    fleet = settings.fleet_slice()
    text()
    check_model_files(settings.model, has_weights=fleet.address is None)
    stack, halted = ExitStack(), threading.Event()
    try:
        enter = functools.partial(stack.enter_context, open_cluster(fleet, halted))
        cluster = await _to_the_end(enter, halted.set)
        from lora_serve.client.ray.serve_transport import ServeTransport
        from lora_serve.engine_host.fleet.app import deploy

        await _to_the_end(lambda: deploy(settings))
        blobs = FleetBlobs(
            StoredBlobs(storage.store, storage.disk),
            settings.adapter_load_threads,
            settings.store / "tmp",
            settings.adapter_load_timeout,
        )
        users = LinkUsers(blobs.run, blobs.left)
        transport, queue = ServeTransport(fleet.name), settings.part(EngineConfig).queue
        client = RayEngineClient(transport, queue, fleet.wait, users, fleet.router)
        try:
            yield RayHost(client, fleet.name, cluster)
        finally:
            await client.stop()
            await blobs.close()
    finally:
        await asyncio.to_thread(stack.close)


async def _to_the_end(work: Callable[[], T], halt: Callable[[], object] = lambda: None) -> T:
    """Runs `work` on a thread. Cancelled, it calls `halt` and waits all the same: Ray is not left half-way."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        halt()
        await asyncio.gather(task, return_exceptions=True)
        raise


@dataclass
class RayHost:
    """See `EngineHost`. Ray Serve starts lost replicas again, and requests wait meanwhile."""

    _client: RayEngineClient
    _name: str
    _cluster: Cluster
    can_restart: bool = False
    is_warm: bool = True

    async def load(self) -> LoadedEngine:
        """See `EngineHost.load`."""
        loaded = asyncio.ensure_future(self._client.load())
        try:
            while not loaded.done():
                await asyncio.wait({loaded}, timeout=_LOOK_SECONDS)
                if not loaded.done():
                    await self._check()
            spec, loop = loaded.result(), asyncio.get_running_loop()
        finally:
            loaded.cancel()
        return LoadedEngine(spec, self._client, EngineVerifier(RemoteValidator(self._client, loop), self._client, loop))

    async def _check(self) -> None:
        from lora_serve.engine_host.fleet.app import failure

        if words := await asyncio.to_thread(failure, self._name):
            raise ModelError(f"The engines cannot be started: {words}")

    def warm_up_done(self) -> None:
        """See `EngineHost.warm_up_done`: replicas warm themselves up."""

    async def ping(self) -> None:
        """See `EngineHost.ping`: Ray Serve watches the replicas."""

    async def lost(self) -> str:
        """See `EngineHost.lost`: for good, when this server's own Ray node has ended."""
        while (reason := self._cluster.ended()) is None:  # noqa: ASYNC110  another process
            await asyncio.sleep(_LOOK_SECONDS)
        return reason

    def kill(self, reason: str) -> None:
        """See `EngineHost.kill`: nothing here hangs with a replica."""
