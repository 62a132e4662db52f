"""The engine's process from within: records in, the engine's mailbox between, records out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.registration.validation_budget import ValidationBudget
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.client import wire
from lora_serve.client.faults import fault_of
from lora_serve.client.record import Record
from lora_serve.core.config import MAX_REGISTRATIONS
from lora_serve.core.errors import LoraServeError, contained
from lora_serve.core.messages import (
    ErrorEvent,
    FinishEvent,
    PooledEvent,
    PromptEvent,
    SmokeTestResult,
    StartedEvent,
    StepEvent,
    TokenEvent,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.engine import messages
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop
from lora_serve.engine_host.fatal import run_fatally
from lora_serve.engine_host.verifier import WeightsValidator

_log = logging.getLogger(__name__)
Written = wire.Token | wire.Started | wire.Prompt | wire.Pooled | wire.Finish | wire.Failed


class HostedEngine(Protocol):
    """What a service runs: `local.LocalEngine`, or a fake."""

    spec: ModelSpec
    engine: Engine

    @property
    def validator(self) -> WeightsValidator: ...

    @property
    def mailbox(self) -> queue.SimpleQueue[messages.Message]: ...

    def rebuild(self) -> Engine: ...

    def settle(self) -> None: ...


class EngineService:
    """Runs an engine's thread from construction until `stop`. `take` is called with every record that comes."""

    def __init__(
        self, hosted: HostedEngine, send: Callable[[Record], None], on_thread: Callable[[], None] = lambda: None
    ) -> None:
        """`on_thread`: called first on each thread that validates adapters."""
        self._hosted = hosted
        self._send = send
        # as many as the registry's threads will ever be: these take turns there, by tenant
        self._validating = ThreadPoolExecutor(MAX_REGISTRATIONS, "validator", initializer=on_thread)
        loop = EngineLoop(hosted.engine, hosted.mailbox, self._emit, hosted.rebuild)
        self.thread = threading.Thread(target=run_fatally("the engine's loop", loop.run), name="engine")
        self.thread.start()

    def take(self, record: wire.ToEngine) -> None:
        """Returns at once. Errands' answers are not for it."""
        put = self._hosted.mailbox.put
        match record:
            case wire.Submit(request):
                put(messages.Submit(request))
            case wire.Abort(request_id):
                put(messages.Abort(request_id))
            case wire.Order(call, what):
                put(messages.Command(what.command, lambda outcome: self._send(_outcome_of(call, outcome))))
            case wire.Stats(call):
                put(messages.StatsQuery(lambda stats: self._send(wire.Figures(call, stats))))
            case wire.Ping(call):
                put(messages.Ping(lambda: self._send(wire.Nothing(call))))
            case wire.Convert() | wire.Validate():
                self._validating.submit(self._validate, record)
            case wire.Forget():
                self._validating.submit(self._hosted.validator.forget)
            case wire.Settle():
                self._hosted.settle()

    def stop(self) -> None:
        """End the engine's thread after its step; requests that still run get NotReadyError."""
        self._hosted.mailbox.put(messages.Stop())
        self.thread.join()
        self._validating.shutdown(cancel_futures=True)

    def _emit(self, events: Sequence[StepEvent]) -> None:
        self._send(wire.Events([_written(event) for event in events]))

    def _validate(self, record: wire.Convert | wire.Validate) -> None:
        try:
            self._send(contained(lambda: self._validated(record)))
        except Exception as error:
            if not isinstance(error, LoraServeError | OSError):
                _log.exception("an adapter could not be validated")
            self._send(wire.CallFailed(record.call, fault_of(error)))

    def _validated(self, record: wire.Convert | wire.Validate) -> wire.Answer:
        folder, spec, validator = Path(record.folder), self._hosted.spec, self._hosted.validator
        budget = ValidationBudget(record.seconds)
        artifact = read_artifact(folder, spec, record.max_rank, digest=record.digest)
        staged = StagedAdapter(folder, artifact, spec, record.max_rank, budget)
        if isinstance(record, wire.Convert):
            validator.convert(staged)
            return wire.Nothing(record.call)
        size = validator.validate(staged, allow_noop=record.allow_noop)
        return wire.Validated(record.call, size.rank, size.num_bytes)


def _outcome_of(call: int, outcome: messages.Outcome) -> wire.Answer:
    if isinstance(outcome, LoraServeError):
        return wire.CallFailed(call, fault_of(outcome))
    return wire.SmokeTested(call, outcome) if isinstance(outcome, SmokeTestResult) else wire.Nothing(call)


def _written(event: StepEvent) -> Written:
    match event:
        case TokenEvent():
            return wire.Token(event)
        case StartedEvent():
            return wire.Started(event)
        case PromptEvent():
            return wire.Prompt(event)
        case PooledEvent():
            return wire.Pooled(event)
        case FinishEvent():
            return wire.Finish(event)
        case ErrorEvent(request_id, error):
            return wire.Failed(request_id, fault_of(error))
