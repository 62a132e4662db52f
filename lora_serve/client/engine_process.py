"""One life of an engine in a child process: started, spoken to, and known to have ended as soon as it has.

The two speak over a socket pair (`frames.py`). The child's end closes with the child, however it dies, so that its
death is known at once; its exit code is waited for beside that, so that it never stays behind as a zombie.
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
from typing import Any

from lora_serve.client.faults import error_of
from lora_serve.client.frames import FrameSplitter, frame_of, from_engine
from lora_serve.client.record import Record
from lora_serve.client.wire import FromEngine, Ready, Refused, Stop
from lora_serve.core.errors import EngineLostError
from lora_serve.core.model_spec import ModelSpec

_log = logging.getLogger(__name__)
READ_SECONDS = 1.0  # for what a child had said before it ended


class EngineProcess:
    """`start` makes one; it lives until `lost` is done."""

    def __init__(self, child: asyncio.subprocess.Process, connection: _Connection) -> None:
        self._child = child
        self._connection = connection
        self._reason = ""
        self._ready: asyncio.Future[ModelSpec] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_look)
        self._receive: Callable[[FromEngine], None] = lambda record: None
        self.lost: asyncio.Task[str] = asyncio.create_task(self._watch(), name=f"engine process {child.pid}")
        connection.receive = self._take

    @classmethod
    async def start(cls, command: Sequence[str], first: Record) -> EngineProcess:
        """Run `command` with the number of its end of the socket pair as its last argument; `first` is sent at once.

        Settings of this process's environment (LORA_SERVE_X) do not reach it: there are secrets among them. Raises
        OSError if there can be no process.
        """
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.enter_context(ours)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("LORA_SERVE_")}
            child = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
            unless_started.pop_all()
        ours.setblocking(False)
        _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, sock=ours)
        process = cls(child, connection)
        process.send(first)
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self, receive: Callable[[FromEngine], None]) -> ModelSpec:
        """Its model, once that is loaded; from then on `receive` gets all that it says, on the event loop.

        Raises what it refused the model with (ModelError, ConfigError), EngineLostError.
        """
        self._receive = receive
        either: set[asyncio.Future[Any]] = {self._ready, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise EngineLostError(f"The engine ended before it was ready ({self.lost.result()}).")
        return self._ready.result()

    def send(self, record: Record) -> None:
        """What is sent to a process that has ended is lost."""
        self._connection.send(frame_of(record))

    def kill(self, reason: str) -> None:
        """SIGKILL; `lost` is done soon."""
        self._reason = self._reason or reason
        if self._child.returncode is None:
            self._child.kill()

    async def end(self, timeout: float) -> None:
        """Ask it to stop; SIGKILL after `timeout` seconds."""
        self.send(Stop())
        done, _ = await asyncio.wait({self.lost}, timeout=timeout)
        if not done:
            self.kill("it did not stop in time")
            await self.lost

    def _take(self, record: FromEngine) -> None:
        if isinstance(record, Ready):
            self._ready.set_result(record.spec)
        elif isinstance(record, Refused):
            self._ready.set_exception(error_of(record.fault))
        else:
            self._receive(record)

    async def _watch(self) -> str:
        """How it ended, in words, once it has and all that it had said was read."""
        exited = asyncio.create_task(self._child.wait())
        closed = asyncio.create_task(self._connection.closed.wait())
        try:
            await asyncio.wait({exited, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():  # it let go of its end: whatever it is doing, nobody hears of it
                await asyncio.wait({exited}, timeout=READ_SECONDS)
            if not exited.done():
                self.kill("it hung up")
            code = await exited
            await asyncio.wait({closed}, timeout=READ_SECONDS)
        finally:
            closed.cancel()
            self._connection.close()
        return self._reason or _words_of(code)


class _Connection(asyncio.Protocol):
    """This process's end."""

    def __init__(self) -> None:
        self.receive: Callable[[FromEngine], None] = lambda record: None
        self.closed = asyncio.Event()
        self._frames = FrameSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """What is no record ends the connection, and so the process."""
        for frame in self._frames.feed(data):
            self.receive(from_engine(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    def send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _words_of(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def _look(ready: asyncio.Future[ModelSpec]) -> None:
    """A refusal that nobody waits for any more is no mistake of ours."""
    if not ready.cancelled():
        ready.exception()
