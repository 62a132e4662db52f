"""One life of an engine in a child process: started, spoken to, and known to have ended as soon as it has.

Messages cross a socket pair (`wire.py`). The child's end closes with the child, however it dies, so that its death is
known at once; its exit code is waited for as well, so that no zombie stays behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from lora_serve.client.connection import Connection
from lora_serve.client.wire import body_of, from_engine
from lora_serve.core.child_environment import without_settings
from lora_serve.core.errors import EngineLostError
from lora_serve.core.messages import Configure, FromEngine, LoadRefused, Ready, Stop, ToEngine
from lora_serve.core.model_spec import ModelSpec

_log = logging.getLogger(__name__)
READ_SECONDS = 1.0  # for the messages that a child had sent before it ended


class EngineProcess:
    """A child made by `start`, alive until `lost` is done.

    The two class attributes say what both ends share because they are on one machine. A transport to another machine
    says otherwise here, and its users already ask.
    """

    shares_files: ClassVar[bool] = True  # a path means the same file on both ends
    clock_offset: ClassVar[float] = 0.0  # seconds by which the engine's time.monotonic() is ahead of this process's

    def __init__(self, child: asyncio.subprocess.Process, connection: Connection) -> None:
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
        _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, sock=ours)
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
            if not exited.done():  # it closed its end: nobody hears of whatever it is doing
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
    """Look at the error, so that asyncio logs none for a refusal that nobody waits for any more."""
    if not ready.cancelled():
        ready.exception()
