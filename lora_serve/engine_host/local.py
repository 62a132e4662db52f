"""An engine with the parts that must be in one process with it: model, loader threads, the adapters' validator."""

from __future__ import annotations

import gc
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lora_serve.adapters.loading.blobs import Blobs
from lora_serve.adapters.loading.loader import Loader, Pace
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.engine.build import build_engine
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import Mail
from lora_serve.engine_host.adapter_source import AdapterSource
from lora_serve.engine_host.validator import LastFolded, LocalValidator
from lora_serve.model.build import ModelParts, build_model
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.system.threads import use_one_core


class LocalEngine:
    """Built in one go; `close` after the engine's thread has ended."""

    def __init__(self, parts: ModelParts, engine: EngineConfig, adapters: AdapterConfig, blobs: Blobs) -> None:
        self.spec: ModelSpec = parts.spec
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._parts = parts
        self._configs = engine, adapters
        self._is_warm = False
        last_folded = LastFolded()
        self.validator = LocalValidator(parts.fold, parts.undo, last_folded)
        source = AdapterSource(blobs, parts, last_folded.take)
        self._loader: Loader[HostAdapter] = Loader(
            source.load,
            self.mailbox.put,
            adapters.load_threads,
            keep=source.keep,
            pace=Pace(lambda: self.engine.is_busy and self._is_warm),  # loads need not give way to the warm-up's steps
            on_start=use_one_core,
            timeout=adapters.load_timeout,
        )
        self.engine: Engine = self.rebuild()

    def rebuild(self) -> Engine:
        """Replaces the engine by one with empty tables."""
        parts = self._parts
        self.engine = build_engine(
            parts.runner, parts.spec, parts.num_blocks, *self._configs, self._loader.submit, memory=parts.memory
        )
        return self.engine

    def warm_up_done(self) -> None:
        """The warm-up is over: loads give way to steps from now on."""
        self._is_warm = True

    def close(self) -> None:
        """Wait for the loads that have begun."""
        self._loader.close()


def build_parts(model: ModelConfig, engine: EngineConfig, adapters: AdapterConfig) -> ModelParts:
    """Builds the model on a thread whose OpenMP team ends with it (`model/system`). Raises ModelError, ConfigError."""
    with _without_collections(), ThreadPoolExecutor(1, "build") as thread:
        return thread.submit(build_model, model, engine, adapters.max_loras, adapters.device_bytes).result()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns the collector off: the objects built here stay, and searching them for garbage costs time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
