"""The engine's end of the socket pair: frames in on the thread that asks, frames out on a thread of its own.

In the engine's process no part outlives another: where one ends by a bug, so does the process. Half an engine would
answer nothing, and the server would learn of it minutes later, from its watchdog.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from lora_serve.client.wire import FrameSplitter, frame_of, to_engine
from lora_serve.core.errors import start_error
from lora_serve.core.messages import FromEngine, LoadRefused, ToEngine
from lora_serve.logs.handler import flush_log

FAILED = 1  # exit code
REFUSED = 2  # exit code: a setting or the model is wrong, or there is too little memory
_READ_BYTES = 2**18
_log = logging.getLogger(__name__)


@contextmanager
def fatal(name: str) -> Iterator[None]:
    """Ends the process at once, after a line in the log, for whatever the block raises."""
    try:
        yield
    except BaseException:
        _log.critical("the engine's process ends: %s failed", name, exc_info=True)
        flush_log()
        os._exit(FAILED)


def run_fatally(name: str, work: Callable[[], None]) -> Callable[[], None]:
    """`work` for a thread, in a `fatal` block."""

    def run() -> None:
        with fatal(name):
            work()

    return run


class Channel:
    """`send` may be called from any thread and never waits, so that no step waits for the other process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._outbox: queue.SimpleQueue[Sequence[FromEngine] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=run_fatally("the thread that writes to the server", self._write), name="to server", daemon=True
        )
        self._writer.start()

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send messages as one frame. Frames arrive in the order in which they were sent."""
        self._outbox.put(messages)

    def messages(self) -> Iterator[ToEngine]:
        """The messages that arrive, until the other end is closed."""
        frames = FrameSplitter()
        while data := self._received():
            for frame in frames.feed(data):
                yield from to_engine(frame)

    def close(self) -> None:
        """Close the connection after everything was sent."""
        self._outbox.put(None)
        self._writer.join()
        self._end.close()

    def refuse(self, error: Exception) -> NoReturn:
        """Tell the server why there is no engine, and end the process. Raises what `start_error` raises."""
        self.send([LoadRefused(start_error(error))])
        self.close()
        flush_log()
        os._exit(REFUSED)

    def _received(self) -> bytes:
        try:
            return self._end.recv(_READ_BYTES)
        except OSError:
            return b""

    def _write(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._outbox.get()]
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._outbox.get_nowait())
            is_open = None not in waiting
            try:
                self._end.sendall(b"".join(frame_of(messages) for messages in waiting if messages is not None))
            except OSError:  # the other end is closed; the reader sees it too
                return
