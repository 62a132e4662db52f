"""The client of an engine in a child process: HTTP and engine share no GIL, and a crash ends the engine alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from lora_serve.client.engine_process import EngineProcess
from lora_serve.client.message_client import MessageClient
from lora_serve.core.blob_messages import BlobMessage
from lora_serve.core.errors import ConfigError, EngineLostError, LoraServeError, ModelError, NotReadyError
from lora_serve.core.messages import AdapterCommand, Evict, FromEngine, Reply, SmokeTestResult, Submit, ToEngine, Unpin
from lora_serve.core.model_spec import ModelSpec
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate

_log = logging.getLogger(__name__)
RETRY_AFTER = 5.0  # seconds
STOP_SECONDS = 10.0  # that the child may take to end
KILL_SECONDS = 1.0  # within which a child that is killed is gone, as a rule
RELOAD_SECONDS = 30.0  # that a new engine's readiness waits for the adapters of the last one


class ProcessEngineClient(MessageClient):
    """See `EngineClient`. After the child's end `start` starts another one and brings it to the desired state."""

    def __init__(
        self,
        spawn: Callable[[], Awaitable[EngineProcess]],
        gate: QueueGate,
        desired: DesiredState,
        serve_blobs: Callable[[BlobMessage, Callable[[Reply], None]], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`serve_blobs`: called with what the engine's loaders need of the stores, and with where to send the answer.
        `ended`: called when an engine has ended: nobody waits for its blobs any more.
        """
        super().__init__(gate)
        self._spawn = spawn
        self._desired = desired
        self._serve_blobs = serve_blobs
        self._after_end = ended
        self._starting: EngineProcess | None = None
        self._process: EngineProcess | None = None
        self._spec: ModelSpec | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The id of the child that runs now or is being started."""
        process = self._process or self._starting
        return None if process is None else process.pid

    async def spawn(self) -> None:
        """Let a child begin to load, without waiting for it."""
        if self._starting is None and self._process is None:
            self._starting = await self._spawn()

    async def load(self) -> ModelSpec:
        """The model, once a child has loaded it.

        Raises EngineLostError; ModelError, ConfigError from the first child only: a model served once is right.
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
        """Start an engine unless one is there, and repeat to it the commands that the last one had done."""
        if self._process is not None:
            return
        await self.load()
        # sent in this order, and not waited for one by one
        commands = (*self._desired.limits(), *self._desired.residents())
        if commands:
            await asyncio.wait([asyncio.ensure_future(self._repeat(one)) for one in commands], timeout=RELOAD_SECONDS)

    async def adapters(self, command: AdapterCommand) -> SmokeTestResult | None:
        """See `EngineClient.adapters`."""
        if isinstance(command, Unpin | Evict):  # even if this engine is lost: the next one must not bring it back
            self._desired.note(command)
        value = await super().adapters(command)
        self._desired.note(command)
        return value

    def tell(self, message: ToEngine) -> None:
        """Send a message that is not answered; without an engine it is lost."""
        if self._process is not None:
            self._process.send(message)

    async def lost(self) -> str:
        """Describes how the engine ended, once it has."""
        process = self._process
        return "it is not there" if process is None else await asyncio.shield(process.lost)

    def kill(self, reason: str) -> None:
        """End the child at once, without a message. If that takes a while, whoever waits for it is told meanwhile."""
        process = self._process or self._starting
        if process is not None:
            process.kill(reason)
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._tell_meanwhile, process)

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
            process = self._starting
            assert process is not None
            return process, await self._ready(process)
        except (ModelError, ConfigError, OSError) as error:
            if self._spec is None and not isinstance(error, OSError):
                raise
            raise EngineLostError(f"The engine cannot be started at present: {error}") from error
        finally:
            self._starting = None

    async def _ready(self, process: EngineProcess) -> ModelSpec:
        """The child's model; a child that nobody waits for any more is ended."""
        try:
            return await process.ready(lambda messages: self._take(process, messages))
        except BaseException:
            process.kill("it was not waited for")
            await asyncio.shield(process.lost)
            raise

    async def _repeat(self, command: AdapterCommand) -> None:
        try:
            await self.adapters(command)
        except LoraServeError as error:
            _log.warning("the new engine refused a %s: %s", type(command).__name__, error)

    def _send(self, message: ToEngine) -> None:
        process = self._process
        if process is None or process.is_killed:
            words = "The server is shutting down." if self._is_stopping else "The engine is being started."
            raise NotReadyError(words, RETRY_AFTER)
        if isinstance(message, Submit):
            self._desired.use(message.request.refs)
            message = Submit(message.request.on_clock(process.clock_offset))
        process.send(message)

    def _take(self, process: EngineProcess, messages: Sequence[FromEngine]) -> None:
        """On the event loop. An answer about a blob goes to the engine that asked, and to no other."""
        for message in self._receive(messages):
            assert isinstance(message, BlobMessage), "a loaded engine says nothing else"
            self._serve_blobs(message, process.send)

    def _lose(self, process: EngineProcess) -> None:
        """The child has ended: whoever waited for it is told now."""
        if self._process is process:
            self._process = None
        num_lost = self._fail_all(self._lost_error)
        self._after_end()
        if not self._is_stopping:
            _log.error(
                "the engine's process %d is lost: %s; %d requests ended", process.pid, process.lost.result(), num_lost
            )

    def _tell_meanwhile(self, process: EngineProcess) -> None:
        """Whoever waits for a child that was killed is told, though it is not gone."""
        if self._process is process:
            num_lost = self._fail_all(self._lost_error)
            _log.error(
                "the engine's process %d was killed and is still there; %d requests ended", process.pid, num_lost
            )

    def _lost_error(self) -> LoraServeError:
        if self._is_stopping:
            return NotReadyError("The server is shutting down.", RETRY_AFTER)
        return EngineLostError("The engine stopped unexpectedly and is being restarted; try again.", RETRY_AFTER)
