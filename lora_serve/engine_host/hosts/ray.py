"""--engine ray: engines on a Ray cluster, replicas of a Serve application, behind this server's web. No torch here."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import safe_open
from transformers import AutoConfig

from lora_serve.adapters.storage import AdapterStorage
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.client.ray.attached import LinkUsers
from lora_serve.client.ray.client import RayEngineClient
from lora_serve.client.verifier import remote_verifier
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ModelError, on_one_line
from lora_serve.core.gguf_file import gguf_of, read_gguf
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.blobs import FleetBlobs
from lora_serve.engine_host.fleet.cluster import Cluster, open_cluster
from lora_serve.engine_host.hosts import EngineHost, LoadedEngine

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
        users = LinkUsers(blobs.run, blobs.close_link)
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


class RayHost(EngineHost):
    """Ray Serve watches the replicas, which warm themselves up, and starts lost ones again; requests wait meanwhile."""

    is_warm = True

    def __init__(self, client: RayEngineClient, name: str, cluster: Cluster) -> None:
        self._client, self._name, self._cluster = client, name, cluster

    async def load(self) -> LoadedEngine:
        loaded = asyncio.ensure_future(self._client.load())
        try:
            while not loaded.done():
                await asyncio.wait({loaded}, timeout=_LOOK_SECONDS)
                if not loaded.done():
                    await self._check()
            spec = loaded.result()
        finally:
            loaded.cancel()
        return LoadedEngine(spec, self._client, remote_verifier(self._client))

    async def _check(self) -> None:
        from lora_serve.engine_host.fleet.app import failure

        if words := await asyncio.to_thread(failure, self._name):
            raise ModelError(f"The engines cannot be started: {words}")

    async def lost(self) -> str:
        """For good, when this server's own Ray node has ended."""
        while (reason := self._cluster.ended()) is None:  # noqa: ASYNC110  another process
            await asyncio.sleep(_LOOK_SECONDS)
        return reason


def check_model_files(model: str, has_weights: bool) -> None:
    """Raises ModelError for what no replica could load; `has_weights` is False if they are with the replicas alone."""
    if (file := gguf_of(model)) is not None:
        read_gguf(file)
        return
    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken folder
        raise ModelError(f"--model {model}: config.json cannot be used: {on_one_line(error)}") from error
    if has_weights and Path(model).is_dir():
        _check_weights(Path(model))


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"--model {folder}: cannot be loaded: there are no weights, no file *.safetensors")
    for file in files:
        try:
            with safe_open(file, "np"):
                pass  # the header is read, and its tensors' places are compared with the file's size
        except Exception as error:  # safetensors has a kind of its own, and those of files
            raise ModelError(f"--model {folder}: cannot be loaded: {file.name}: {on_one_line(error)}") from error
