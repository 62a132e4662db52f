"""The engine of an engine process: messages in, through the engine's mailbox, and its messages out."""

from __future__ import annotations

import functools
import logging
import queue
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
    Convert,
    Converted,
    ForgetStaged,
    FromEngine,
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
from lora_serve.engine_host.channel import run_fatally

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

    def opened(self, message: Convert | Validate) -> AbstractContextManager[Path]:
        """The folder, as this process sees it. Raises AdapterUnavailableError, OSError."""

    def changed(self, message: Convert, folder: Path) -> Converted | None:
        """Brings what was converted to where it is wanted; None if it is there. Raises AdapterUnavailableError."""


class SharedFolders:
    """See StagedFolders: both sides see the same files."""

    def opened(self, message: Convert | Validate) -> AbstractContextManager[Path]:
        assert message.folder is not None
        return nullcontext(message.folder)

    def changed(self, message: Convert, folder: Path) -> Converted | None:
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
        with self._folders.opened(message) as folder:
            budget = ValidationBudget(message.seconds)
            artifact = read_artifact(folder, spec, message.max_rank, digest=message.digest)
            staged = StagedAdapter(folder, artifact, spec, message.max_rank, budget)
            if isinstance(message, Validate):
                return Reply(message.call_id, validator.validate(staged, allow_noop=message.allow_noop))
            validator.convert(staged)
            return Reply(message.call_id, self._folders.changed(message, folder))
