"""The engine's end of the socket pair: frames in on the thread that asks, frames out on a thread of its own."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from lora_serve.client.frames import FrameSplitter, frame_of, to_engine
from lora_serve.client.record import Record
from lora_serve.client.wire import ToEngine
from lora_serve.engine_host.fatal import run_fatally

_READ_BYTES = 2**18


class Channel:
    """`send` may be called from any thread and never waits, so that no step waits for the other process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._outbox: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=run_fatally("what speaks to the server", self._write), name="to server", daemon=True
        )
        self._writer.start()

    def send(self, record: Record) -> None:
        """Records arrive in the order in which they were sent."""
        self._outbox.put(record)

    def records(self) -> Iterator[ToEngine]:
        """Those that come, until the other end is closed."""
        frames = FrameSplitter()
        while data := self._received():
            for frame in frames.feed(data):
                yield to_engine(frame)

    def close(self) -> None:
        """After everything was sent."""
        self._outbox.put(None)
        self._writer.join()
        self._end.close()

    def _received(self) -> bytes:
        try:
            return self._end.recv(_READ_BYTES)
        except OSError:
            return b""

    def _write(self) -> None:
        is_open = True
        while is_open:
            records = [self._outbox.get()]
            with suppress(queue.Empty):
                while True:
                    records.append(self._outbox.get_nowait())
            is_open = None not in records
            try:
                self._end.sendall(b"".join(frame_of(record) for record in records if record is not None))
            except OSError:  # nobody listens; the reader sees it too
                return
