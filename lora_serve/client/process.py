"""The client of an engine in a child process: HTTP and engine share no GIL, and a crash ends the engine alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

from lora_serve.client.base import MessageClient
from lora_serve.client.wire import FrameConnection, body_of, from_engine
from lora_serve.core.blob_messages import BlobMessage
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, EngineLostError, LoraServeError, ModelError, NotReadyError
from lora_serve.core.messages import (
    AdapterCommand,
    Configure,
    Evict,
    FromEngine,
    LoadRefused,
    Ready,
    Reply,
    SmokeTestResult,
    Stop,
    Submit,
    ToEngine,
    Unpin,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.process import without_settings
from lora_serve.core.settings import Settings
from lora_serve.engine.desired_state import DesiredState
from lora_serve.engine.queue_gate import QueueGate

_log = logging.getLogger(__name__)
READ_SECONDS = 1.0  # for the messages that a child had sent before it ended
# Settings of adapters that an engine's process is not told.
_SERVERS_OWN = (
    "redis_url", "adapter_root", "adapter_url", "lora_modules", "registration_threads", "tenant_registration_seconds",
)  # fmt: skip
RETRY_AFTER = 5.0  # seconds
STOP_SECONDS = 10.0  # that the child may take to end
KILL_SECONDS = 1.0  # within which a child that is killed is gone, as a rule
RELOAD_SECONDS = 30.0  # that a new engine's readiness waits for the adapters of the last one


class EngineProcess:
    """A child made by `start`, alive until `lost` is done. Both ends see the same files, and have one clock."""

    def __init__(self, child: asyncio.subprocess.Process, connection: FrameConnection) -> None:
        self._child = child
        self._connection = connection
        self._reason = ""
        self._ready: asyncio.Future[ModelSpec] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_retrieve)
        self._receive: Callable[[list[FromEngine]], None] = lambda messages: None
        self.lost: asyncio.Task[str] = asyncio.create_task(self._watch(), name=f"engine process {child.pid}")
        connection.receive = self._take

    @classmethod
    async def start(cls, command: Sequence[str], configure: Configure) -> EngineProcess:
        """Run `command` with the number of its end of the socket pair as its last argument, and send `configure`.

        Settings in this process's environment (LORA_SERVE_X) are withheld, as there are secrets among them;
        LORA_SERVE_KERNELS is none and is handed on. Raises OSError if there can be no process.
        """
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.enter_context(ours)
            child = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=without_settings(os.environ),
            )
            unless_started.pop_all()
        ours.setblocking(False)
        _, connection = await asyncio.get_running_loop().create_unix_connection(FrameConnection, sock=ours)
        process = cls(child, connection)
        process.send(configure)
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_killed(self) -> bool:
        """True from `kill` on: nothing that it is sent will be answered."""
        return bool(self._reason)

    async def ready(self, receive: Callable[[list[FromEngine]], None]) -> ModelSpec:
        """The engine's model, once it is loaded; from then on `receive` gets every message, on the event loop.

        Raises the error with which the engine refused the model (ModelError, ConfigError), EngineLostError.
        """
        self._receive = receive
        either: set[asyncio.Future[Any]] = {self._ready, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise EngineLostError(f"The engine ended before it was ready ({self.lost.result()}).")
        return self._ready.result()

    def send(self, message: ToEngine) -> None:
        """Send a message; to a process that has ended it is lost."""
        self._connection.send(body_of([message]))

    def kill(self, reason: str) -> None:
        """Send SIGKILL; `lost` is done soon."""
        self._reason = self._reason or reason
        if self._child.returncode is None:
            self._child.kill()

    async def end(self, timeout: float) -> None:
        """Ask the engine to stop; send SIGKILL after `timeout` seconds."""
        self.send(Stop())
        done, _ = await asyncio.wait({self.lost}, timeout=timeout)
        if not done:
            self.kill("it did not stop in time")
            await self.lost

    def _take(self, frame: bytes) -> None:
        messages = from_engine(frame)
        match messages:
            case [Ready(spec)]:
                self._ready.set_result(spec)
            case [LoadRefused(error)]:
                self._ready.set_exception(error)
            case _:
                self._receive(messages)

    async def _watch(self) -> str:
        """Describes how the child ended, once it has and all its messages were read."""
        exited = asyncio.create_task(self._child.wait())
        closed = asyncio.create_task(self._connection.closed.wait())
        try:
            await asyncio.wait({exited, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():  # it closed its end: nothing can be heard of it any more
                await asyncio.wait({exited}, timeout=READ_SECONDS)
            if not exited.done():
                self.kill("it hung up")
            code = await exited
            await asyncio.wait({closed}, timeout=READ_SECONDS)
        finally:
            closed.cancel()
            self._connection.close()
        return self._reason or _words_of(code)


def _words_of(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _retrieve(ready: asyncio.Future[ModelSpec]) -> None:
    """Look at the error, so that asyncio logs none for a refusal that is not awaited any more."""
    if not ready.cancelled():
        ready.exception()


def configure_of(settings: Settings) -> Configure:
    """The first message to the engine's process: neither keys nor the place of anything but adapters' files."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(AdapterConfig) if field.name in _SERVERS_OWN
    }
    adapters = replace(settings.part(AdapterConfig), **defaults)
    return Configure(settings.part(ModelConfig), settings.part(EngineConfig), adapters, settings.log_format)


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
        `ended`: called when an engine has ended, to close its blobs.
        """
        super().__init__(gate, "the new engine")
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
        await self.bring_to((*self._desired.limits(), *self._desired.residents()), RELOAD_SECONDS)

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
        """End the child at once, without a message. If that takes a while, its requests fail meanwhile."""
        process = self._process or self._starting
        if process is not None:
            process.kill(reason)
            asyncio.get_running_loop().call_later(KILL_SECONDS, self._fail_meanwhile, process)

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
        """The child's model; a child that is not awaited any more is ended."""
        try:
            return await process.ready(lambda messages: self._take(process, messages))
        except BaseException:
            process.kill("it was not waited for")
            await asyncio.shield(process.lost)
            raise

    def _send(self, message: ToEngine) -> None:
        process = self._process
        if process is None or process.is_killed:
            words = "The server is shutting down." if self._is_stopping else "The engine is being started."
            raise NotReadyError(words, RETRY_AFTER)
        if isinstance(message, Submit):
            self._desired.use(message.request.refs)
        process.send(message)

    def _take(self, process: EngineProcess, messages: Sequence[FromEngine]) -> None:
        """On the event loop. An answer about a blob goes to the engine that asked, and to no other."""
        for message in self._receive(messages):
            assert isinstance(message, BlobMessage), "a loaded engine says nothing else"
            self._serve_blobs(message, process.send)

    def _lose(self, process: EngineProcess) -> None:
        """The child has ended: its requests and calls fail now."""
        if self._process is process:
            self._process = None
        num_lost = self._fail_all(self._lost_error)
        self._after_end()
        if not self._is_stopping:
            _log.error(
                "the engine's process %d is lost: %s; %d requests ended", process.pid, process.lost.result(), num_lost
            )

    def _fail_meanwhile(self, process: EngineProcess) -> None:
        """The requests and calls of a child that was killed fail, though it is not gone."""
        if self._process is process:
            num_lost = self._fail_all(self._lost_error)
            _log.error(
                "the engine's process %d was killed and is still there; %d requests ended", process.pid, num_lost
            )

    def _lost_error(self) -> LoraServeError:
        if self._is_stopping:
            return NotReadyError("The server is shutting down.", RETRY_AFTER)
        return EngineLostError("The engine stopped unexpectedly and is being restarted; try again.", RETRY_AFTER)
