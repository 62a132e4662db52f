"""The engine of an engine process: messages in, through the engine's mailbox, and its messages out."""

from __future__ import annotations

import functools
import gc
import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.registration.verification import StagedAdapter, ValidationBudget
from lora_serve.client.verifier import WeightsValidator
from lora_serve.core.errors import AdapterUnavailableError, LoraServeError, contained
from lora_serve.core.messages import (
    Configure,
    Convert,
    Converted,
    ForgetStaged,
    FromEngine,
    Ready,
    Reply,
    Stop,
    ToEngine,
    ToLoop,
    Validate,
    WarmUpDone,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.process import PatientThreads
from lora_serve.core.setting_types import MAX_REGISTRATIONS
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop, Mail
from lora_serve.engine_host.channel import Channel, run_fatally
from lora_serve.engine_host.remote_blobs import RemoteBlobs
from lora_serve.logs import configure_logging, timed
from lora_serve.logs.handler import LogHandler
from lora_serve.logs.writer import divert_streams
from lora_serve.model.system.process import return_freed_memory

_log = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """The parts that a service runs: `local.LocalEngine`, or a fake."""

    spec: ModelSpec
    engine: Engine

    @property
    def validator(self) -> WeightsValidator: ...
    @property
    def mailbox(self) -> queue.SimpleQueue[Mail]: ...
    def rebuild(self) -> Engine: ...
    def warm_up_done(self) -> None: ...


class StagedFolders(Protocol):
    """The folders that registrations name. On the service's own threads."""

    def open_folder(self, message: Convert | Validate) -> AbstractContextManager[Path]:
        """The folder, as this process sees it. Raises AdapterUnavailableError, OSError."""

    def bring_back(self, message: Convert, folder: Path) -> Converted | None:
        """Brings what was converted to where it is wanted; None if it is there. Raises AdapterUnavailableError."""


class SharedFolders(StagedFolders):
    """See StagedFolders: both sides see the same files."""

    def open_folder(self, message: Convert | Validate) -> AbstractContextManager[Path]:
        assert message.folder is not None
        return nullcontext(message.folder)

    def bring_back(self, message: Convert, folder: Path) -> Converted | None:
        return None


class EngineService:
    """Runs from the start until `stop`. `take` is called with every message that comes."""

    def __init__(
        self,
        served: ServedEngine,
        send: Callable[[Sequence[FromEngine]], None],
        on_thread: Callable[[], None] = lambda: None,
        folders: StagedFolders | None = None,
    ) -> None:
        """`on_thread`: called first on each thread that validates adapters."""
        self._folders = folders or SharedFolders()
        self._served = served
        self._send = send
        # as many as the registry's threads will ever be: these take turns there, by tenant
        self._validating = PatientThreads(MAX_REGISTRATIONS, "validator", initializer=on_thread)
        loop = EngineLoop(served.engine, served.mailbox, send, served.rebuild)
        self.thread = threading.Thread(target=run_fatally("the engine's loop", loop.run), name="engine")
        self.thread.start()

    def take(self, message: ToEngine) -> None:
        """Handle a message, except answers about blobs; returns at once."""
        if isinstance(message, ToLoop):
            self._served.mailbox.put(message)
        elif isinstance(message, Convert | Validate):
            no_thread = AdapterUnavailableError("There is no thread to take an adapter in at present; try again.")
            refused = [Reply(message.call_id, error=no_thread)]
            self._on_thread(functools.partial(self._validate, message), lambda: self._send(refused))
        elif isinstance(message, ForgetStaged):
            self._on_thread(forget := functools.partial(self._served.validator.forget, message.digest), forget)
        elif isinstance(message, WarmUpDone):
            self._served.warm_up_done()

    def _on_thread(self, work: Callable[[], None], refuse: Callable[[], None]) -> None:
        """Has `work` run on a thread; calls `refuse` here if the system gives none."""
        once = threading.Lock()

        def run() -> None:
            if once.acquire(blocking=False):
                work()

        try:
            self._validating.submit(run)
        except RuntimeError as error:  # the pool may run it all the same, once a thread is free
            if once.acquire(blocking=False):
                _log.warning("no thread to take an adapter in: %r", error)
                refuse()

    def stop(self) -> None:
        """End the engine's thread after its step; requests that still run get NotReadyError."""
        self._served.mailbox.put(Stop())
        self.thread.join()
        self._validating.shutdown(cancel_futures=True)

    def _validate(self, message: Convert | Validate) -> None:
        try:
            with contained():
                reply = self._validated(message)
        except Exception as error:
            if not isinstance(error, LoraServeError | OSError):
                _log.exception("an adapter could not be validated")
            reply = Reply(message.call_id, error=error)
        self._send([reply])

    def _validated(self, message: Convert | Validate) -> Reply:
        spec, validator = self._served.spec, self._served.validator
        with self._folders.open_folder(message) as folder:
            budget = ValidationBudget(message.seconds)
            artifact = read_artifact(folder, spec, message.max_rank, digest=message.digest)
            staged = StagedAdapter(folder, artifact, spec, message.max_rank, budget)
            if isinstance(message, Validate):
                return Reply(message.call_id, validator.validate(staged, allow_noop=message.allow_noop))
            validator.convert(staged)
            return Reply(message.call_id, self._folders.bring_back(message, folder))


class ChildEngine:
    """See `child.RunningEngine`: loads the model on a thread while the main thread listens, then serves."""

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
        from lora_serve.model.loading.transformers_import import import_transformers

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
