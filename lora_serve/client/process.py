"""The engine in a child process: HTTP and engine share no GIL, and a crash of the engine is nobody else's."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from lora_serve.client.engine_process import EngineProcess
from lora_serve.client.faults import error_of
from lora_serve.client.orders import order_of
from lora_serve.client.record import Record
from lora_serve.client.streams import EventStreams
from lora_serve.client.wire import (
    Abort,
    Answer,
    CallFailed,
    CloseBlob,
    Convert,
    Errand,
    Events,
    Failed,
    Figures,
    FromEngine,
    KeepBeside,
    Nothing,
    OpenBlob,
    Order,
    Ping,
    SmokeTested,
    Stats,
    Submit,
    Validate,
    Validated,
)
from lora_serve.core.errors import ConfigError, EngineLostError, LoraServeError, ModelError, NotReadyError
from lora_serve.core.messages import (
    AdapterCommand,
    ErrorEvent,
    Event,
    Evict,
    SmokeTestResult,
    StepEvent,
    Unpin,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate

_log = logging.getLogger(__name__)
RETRY_AFTER = 5.0  # seconds
STOP_SECONDS = 10.0  # that the child may take to end
RELOAD_SECONDS = 30.0  # that a new engine's readiness waits for the adapters of the last one
Call = Order | Stats | Ping | Convert | Validate


class ProcessEngineClient:
    """See `EngineClient`. After the child's end `start` starts another one, which gets the standing orders again."""

    def __init__(
        self,
        spawn: Callable[[], Awaitable[EngineProcess]],
        gate: QueueGate,
        orders: DesiredState,
        errand: Callable[[Errand, Callable[[Record], None]], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`errand`: called with what the engine needs done here, and with where to send the answer. `ended`: called
        when an engine has ended: nobody waits for its errands any more.
        """
        self.gate = gate
        self._spawn = spawn
        self._orders = orders
        self._errand = errand
        self._after_end = ended
        self._streams = EventStreams()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._starting: EngineProcess | None = None
        self._process: EngineProcess | None = None
        self._spec: ModelSpec | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Of the child that runs now, or is being started."""
        process = self._process or self._starting
        return None if process is None else process.pid

    async def spawn(self) -> None:
        """Let a child begin to load, without waiting for it."""
        if self._starting is None and self._process is None:
            self._starting = await self._spawn()

    async def load(self) -> ModelSpec:
        """The model, once a child has loaded it.

        Raises EngineLostError; ModelError, ConfigError from the first one only: what was served once is not wrong.
        """
        if self._process is None or self._spec is None:
            process, spec = await self._loaded()
            if self._spec is not None and spec.fingerprint != self._spec.fingerprint:
                process.kill("the model is another one than before")
                await process.lost
                raise EngineLostError("The engine that was started again found another model than the one served.")
            self._process, self._spec = process, spec
            process.lost.add_done_callback(lambda task: self._lose(process))
        return self._spec

    async def start(self) -> None:
        """Returns at once if an engine is there. What the last one was told, a new one is told again."""
        if self._process is not None:
            return
        await self.load()
        # sent in this order, and not waited for one by one
        orders = (*self._orders.limits(), *self._orders.residents())
        if orders:
            await asyncio.wait([asyncio.ensure_future(self._repeat(order)) for order in orders], timeout=RELOAD_SECONDS)

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """See `EngineClient.infer`."""
        return self._streams.events(self.gate, request, self._submit, self._abort)

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """See `EngineClient.adapters`."""
        if isinstance(command, Unpin | Evict):  # whoever hears of it: the next engine is not told otherwise
            self._orders.note(command)
        answer = await self._ask(lambda call: Order(call, order_of(command)))
        self._orders.note(command)
        return answer.value if isinstance(answer, SmokeTested) else None

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        answer = await self._ask(Stats)
        assert isinstance(answer, Figures)
        return answer.value

    async def ping(self) -> None:
        """Returns between two steps."""
        await self._ask(Ping)

    async def convert(self, folder: str, digest: str, max_rank: int | None, seconds: float) -> None:
        """See `AdapterVerifier.convert`."""
        await self._ask(lambda call: Convert(call, folder, digest, max_rank, seconds))

    async def validate(
        self, folder: str, digest: str, max_rank: int | None, allow_noop: bool, seconds: float
    ) -> Validated:
        """See `AdapterVerifier.validate`."""
        answer = await self._ask(lambda call: Validate(call, folder, digest, max_rank, allow_noop, seconds))
        assert isinstance(answer, Validated)
        return answer

    def tell(self, record: Record) -> None:
        """Something without an answer; lost if there is no engine."""
        if self._process is not None:
            self._process.send(record)

    async def lost(self) -> str:
        """How the engine ended, in words, once it has."""
        process = self._process
        return "it is not there" if process is None else await asyncio.shield(process.lost)

    def kill(self, reason: str) -> None:
        """End the child at once, without a word."""
        process = self._process or self._starting
        if process is not None:
            process.kill(reason)

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        self._is_stopping = True
        process = self._process or self._starting
        if process is not None:
            await process.end(STOP_SECONDS)
        self._process = self._starting = None

    # ----------------------------------------------------------------------------------------------------------

    async def _loaded(self) -> tuple[EngineProcess, ModelSpec]:
        try:
            await self.spawn()
            process, self._starting = self._starting, None
            assert process is not None
            return process, await self._ready(process)
        except (ModelError, ConfigError, OSError) as error:
            if self._spec is None and not isinstance(error, OSError):
                raise
            raise EngineLostError(f"The engine cannot be started at present: {error}") from error

    async def _ready(self, process: EngineProcess) -> ModelSpec:
        """A child that nobody waits for any more is ended."""
        try:
            return await process.ready(lambda record: self._receive(process, record))
        except BaseException:
            process.kill("it was not waited for")
            await asyncio.shield(process.lost)
            raise

    async def _repeat(self, order: AdapterCommand) -> None:
        try:
            await self.adapters(order)
        except LoraServeError as error:
            _log.warning("the new engine refused a %s: %s", type(order).__name__, error)

    async def _ask(self, record: Callable[[int], Call]) -> Answer:
        """Send a call and wait for its answer. Raises what it failed with."""
        process = self._running()
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            process.send(record(number))
            found = await answer
        finally:
            del self._calls[number]
        if isinstance(found, CallFailed):
            raise error_of(found.fault)
        return found

    def _submit(self, request: InferenceRequest) -> None:
        self._running().send(Submit(request))
        self._orders.use(request.refs)

    def _abort(self, request_id: str) -> None:
        self.tell(Abort(request_id))

    def _running(self) -> EngineProcess:
        if self._process is None:
            words = "The server is shutting down." if self._is_stopping else "The engine is being started."
            raise NotReadyError(words, RETRY_AFTER)
        return self._process

    def _receive(self, process: EngineProcess, record: FromEngine) -> None:
        """On the event loop: what an engine says. Only the one that sent an errand gets its answer."""
        if isinstance(record, Events):
            self._streams.deliver(self.gate, map(_event_of, record.events))
        elif isinstance(record, OpenBlob | CloseBlob | KeepBeside):
            self._errand(record, process.send)
        elif isinstance(record, Nothing | SmokeTested | Figures | Validated | CallFailed):
            answer = self._calls.get(record.call)
            if answer is not None and not answer.done():
                answer.set_result(record)

    def _lose(self, process: EngineProcess) -> None:
        """The child has ended: whoever waited for it hears of it now."""
        if self._process is process:
            self._process = None
        num_lost = self._streams.fail_all(self._lost_error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._lost_error())
        self._after_end()
        if not self._is_stopping:
            _log.error(
                "the engine's process %d is lost: %s; %d requests ended", process.pid, process.lost.result(), num_lost
            )

    def _lost_error(self) -> LoraServeError:
        if self._is_stopping:
            return NotReadyError("The server is shutting down.", RETRY_AFTER)
        return EngineLostError("The engine stopped unexpectedly and is being restarted; try again.", RETRY_AFTER)


def _event_of(record: Record) -> StepEvent:
    if isinstance(record, Failed):
        error = error_of(record.fault)
        assert isinstance(error, LoraServeError)
        return ErrorEvent(record.request_id, error)
    return record.event  # type: ignore[attr-defined, no-any-return]
