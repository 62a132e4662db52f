"""The real engine of an engine process: loads the model on a thread while the main thread listens, then serves."""

from __future__ import annotations

import gc
import logging
import sys
import threading

from lora_serve.core.messages import Configure, Ready, Reply, ToEngine, WarmUpDone
from lora_serve.engine_host.channel import Channel, run_fatally
from lora_serve.engine_host.remote_blobs import RemoteBlobs
from lora_serve.engine_host.service import EngineService
from lora_serve.logs import configure_logging, timed
from lora_serve.logs.handler import LogHandler
from lora_serve.logs.writer import divert_streams
from lora_serve.model.loading.transformers_import import import_transformers
from lora_serve.model.system.process import return_freed_memory

_log = logging.getLogger(__name__)


class ChildEngine:
    """See `child.Engine`."""

    def __init__(self, configure: Configure, channel: Channel) -> None:
        self._configure = configure
        self._channel = channel
        self._blobs = RemoteBlobs(channel.send, configure.adapters.store / "tmp")
        self._service: EngineService | None = None
        threading.Thread(target=run_fatally("the start", self._start), name="start", daemon=True).start()

    def take(self, message: ToEngine) -> None:
        """Handle a message. Before `Ready` was sent only answers about blobs come."""
        if isinstance(message, Reply):
            self._blobs.answered(message)
            return
        if isinstance(message, WarmUpDone):
            _freeze_garbage_collector()
        if self._service is not None:
            self._service.take(message)

    def stop(self) -> None:
        """End the engine. Loads that wait for the parent are not waited for: the process ends anyway."""
        if self._service is not None:
            self._service.stop()

    def _start(self) -> None:
        """Load the model and tell the parent; the process ends if the model cannot be loaded."""
        try:
            self._load()
        except Exception as error:
            self._channel.refuse(error)

    def _load(self) -> None:
        configure = self._configure
        import_transformers(configure.model.quantization, configure.model.model)
        configure_logging(configure.log_format, handler=LogHandler(divert_streams()))
        from lora_serve.engine_host.local import LocalEngine, build_parts
        from lora_serve.model.system.threads import use_one_core
        from lora_serve.text.tokenizer import TextModel

        sys.setswitchinterval(0.0005)  # see launch.py
        use_one_core()
        with timed(f"model {configure.model.model}"):
            parts = build_parts(configure.model, configure.engine, configure.adapters)
        gc.freeze()
        engine = LocalEngine(
            parts, configure.engine, configure.adapters, self._blobs, lambda: TextModel.load(parts.spec.name)
        )
        self._service = EngineService(engine, self._channel.send, use_one_core)
        self._channel.send([Ready(parts.spec)])


def _freeze_garbage_collector() -> None:
    """Take all objects that are here out of collections: a full one would stop every thread for 0.2 s now and then."""
    gc.collect()
    gc.freeze()
    return_freed_memory()
