"""The engine of a fleet's replica: loaded, warmed up, and spoken to by the gateways that are attached. No Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve import __version__
from lora_serve.adapters.checkpoint.content import dummy_adapter_ref
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import StoreLock, lock_store, remove_folder
from lora_serve.client.base import MessageClient
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import ConfigError, InternalError, InvalidRequestError
from lora_serve.core.messages import (
    Configure,
    Evict,
    FromEngine,
    Greeting,
    Ready,
    Reply,
    Reported,
    Submit,
    ToEngine,
    WarmUpDone,
)
from lora_serve.core.process import files_id, machine_id
from lora_serve.core.request import InferenceRequest
from lora_serve.core.setting_groups.engine import QueueLimits
from lora_serve.core.stats import ReplicaReport, report_of
from lora_serve.engine.queue_gate import QueueGate
from lora_serve.engine.warmup import WarmupStage, grammar_stage, warmup_stages
from lora_serve.engine_host.fleet.blobs import ReplicaBlobs, scratch_prefix
from lora_serve.engine_host.fleet.gateways import OWN, Gateways
from lora_serve.engine_host.fleet.ray_hooks import load
from lora_serve.engine_host.service import EngineService, ServedEngine
from lora_serve.logs import configure_logging, timed
from lora_serve.routing.fleet_view import RecentRoots, prefix_roots

if TYPE_CHECKING:
    from lora_serve.engine_host.local import LocalEngine

_log = logging.getLogger(__name__)
REPORT_SECONDS = 1.0
_PREFIX = "lora_serve-"
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


class ReplicaEngine:
    """A served engine and its gateways, on one event loop."""

    def __init__(
        self,
        served: ServedEngine,
        replica: str,
        settings: str,
        roots_key: bytes,
        node: str = "",
        blobs: ReplicaBlobs | None = None,
        on_thread: Callable[[], None] = lambda: None,
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        """`settings`: a digest of what the engine was configured with. `blobs`: of the engine's loaders."""
        self._spec = served.spec
        self._name, self._settings, self._roots_key, self._node = replica, settings, roots_key, node
        self._asked_at: float | None = None  # of a question that was not answered yet
        self._last_report: ReplicaReport | None = None
        self._started_at = time.monotonic()
        self._roots = RecentRoots()
        self._own = _OwnClient()
        answered: Callable[[Reply], None] = _drop if blobs is None else blobs.answered
        self.gateways = self._own.gateways = Gateways(self._take, answered, self._own.receive)
        if blobs is not None:
            blobs.gateways = self.gateways
        self._service = EngineService(served, self.gateways.send, on_thread, blobs)
        self._report_seconds = report_seconds
        self._reporting = asyncio.create_task(self._report())

    async def warm_up(self, mode: str, config: EngineConfig) -> None:
        """Runs dummy rows through the ordinary step, before any gateway is there."""
        dummy = dummy_adapter_ref(self._spec)
        stages = warmup_stages(mode, self._spec, config, dummy)
        for stage in stages:
            with timed(f"warm-up: {stage.name}"):
                await self._run(stage)
        if stages:
            if self._spec.pooling is None:
                try:
                    await self._run(grammar_stage(self._spec, dummy))
                except (InvalidRequestError, InternalError) as error:
                    _log.warning("there is no structured output: %s", error)
            await self._own.adapters(Evict(dummy.digest, forget=True))
        self._service.take(WarmUpDone())
        gc.collect()
        gc.freeze()

    def greeting(self) -> Sequence[FromEngine]:
        """The first messages to a gateway."""
        now = time.monotonic()
        age = now - self._started_at
        greeting = Greeting(
            self._name, machine_id(), files_id(), self._node, age, __version__, self._settings, self._roots_key, now
        )
        return greeting, Ready(self._spec)

    @property
    def seconds_without_progress(self) -> float:
        """The age of the oldest question that waits for the end of a step."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def is_reporting(self) -> bool:
        """False once an error has ended the reports, without which gateways take the replica for lost."""
        return not self._reporting.done()

    @property
    def load(self) -> dict[str, float]:
        """See `ray_hooks.load`."""
        report = self._last_report
        return load(0, 0) if report is None else load(report.waiting_tokens, report.num_running + report.num_waiting)

    async def stop(self) -> None:
        """End the engine; what still runs gets NotReadyError."""
        self._reporting.cancel()
        await asyncio.to_thread(self._service.stop)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._roots.add(prefix_roots(message.request, self._roots_key))
        self._service.take(message)

    async def _run(self, stage: WarmupStage) -> None:
        await asyncio.gather(*(self._exhaust(replace(one, arrival_time=time.monotonic())) for one in stage.requests))

    async def _exhaust(self, request: InferenceRequest) -> None:
        async for _ in self._own.infer(request):
            pass

    async def _report(self) -> None:
        """A step may take longer than a second: the last report is sent again then, as silence means a loss."""
        while True:
            looking = asyncio.ensure_future(self._look())
            while not looking.done():
                await asyncio.wait({looking}, timeout=self._report_seconds)
                if self._last_report is not None:
                    self.gateways.report(Reported(self._last_report, self.gateways.num_attached))
            await asyncio.sleep(self._report_seconds)

    async def _look(self) -> None:
        self._asked_at = time.monotonic()
        stats = await self._own.stats()
        self._asked_at = None
        self._last_report = report_of(self._name, time.monotonic(), stats, self._roots.roots)


class _OwnClient(MessageClient):
    """The replica's own client of its engine: warm-up, figures, health."""

    gateways: Gateways

    def __init__(self) -> None:
        super().__init__(QueueGate(QueueLimits(max_queue=2**31)))

    def receive(self, message: FromEngine) -> None:
        """Hand a message to the call that waits for it."""
        self._receive([message])

    def _send(self, message: ToEngine) -> None:
        self.gateways.ask(OWN, message)


def _drop(reply: Reply) -> None:
    """Without blobs nothing is asked."""


def load_engine(configure: Configure, replica: str, files: Path) -> tuple[LocalEngine, ReplicaBlobs]:
    """The engine, and the folders that its loaders read; copies of them lie in `files`, if nothing else was said. In a
    replica's actor alone: imports torch.

    Raises ModelError, ConfigError, OSError.
    """
    from lora_serve.model.loading.transformers_import import import_transformers
    from lora_serve.model.system.threads import use_one_core

    import_transformers(configure.model.quantization, configure.model.model)
    configure_logging("json")  # the server takes the lines apart (output.py)
    from lora_serve.engine_host.local import LocalEngine, build_parts
    from lora_serve.text.tokenizer import TextModel

    use_one_core()
    with timed(f"model {configure.model.model}"):
        parts = build_parts(configure.model, configure.engine, configure.adapters)
    gc.freeze()
    blobs = ReplicaBlobs(_cache(configure.adapters, files), scratch_prefix(replica))
    engine = LocalEngine(parts, configure.engine, configure.adapters, blobs, lambda: TextModel.load(parts.spec.name))
    return engine, blobs


def _cache(config: AdapterConfig, files: Path) -> DiskStore:
    """For copies of what this machine does not see: as many bytes as a server's own cache, or half of what is free."""
    folder, _ = own_folder(files if config.store == Path() else config.store)  # locked until this process ends
    max_bytes = config.adapter_disk_memory or shutil.disk_usage(folder).free // 2
    return DiskStore(folder, max_bytes, is_cache=True, policy=config.adapter_eviction)


def own_folder(parent: Path) -> tuple[Path, StoreLock]:
    """A new folder of this replica's own, whose lock ends with the process. Those of processes that ended, however they
    did, are removed. Raises OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ConfigError):  # another process holds it
            _remove_if_left(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    return folder, lock_store(folder)


def _remove_if_left(folder: Path) -> None:
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_ours and time.time() - status.st_mtime > _YOUNG:
        lock = lock_store(folder)
        try:
            remove_folder(folder)
        finally:
            lock.close()
