"""Timeouts of a transfer, which hold also for a source that sends single bytes for ever."""

from __future__ import annotations

import io
import socket
import time
from dataclasses import dataclass
from typing import Any

from lora_serve.adapters.sources.intake import Progress
from lora_serve.core.errors import AdapterUnavailableError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one transfer, in seconds."""

    idle: float = 20.0  # to connect, and between two bytes
    headers: float = 30.0  # from a request to the end of the response headers
    total: float = 3600.0  # the whole transfer
    window: float = 60.0  # in each window at least `window_bytes` must arrive
    window_bytes: int = 2**16


DEFAULT_TIMEOUTS = Timeouts()


class TransferClock:
    """Measures one transfer. `timeouts.total` counts from the construction, a window only while bytes are awaited."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._end = self._end_of_phase = time.monotonic() + timeouts.total
        self._waited, self._num_bytes = 0.0, 0  # in this window
        self._has_windows = False

    def begin_headers(self) -> None:
        """Called when a request is sent."""
        self._end_of_phase = min(self._end, time.monotonic() + self._timeouts.headers)
        self._has_windows = False

    def begin_body(self) -> None:
        """Called when the response headers have arrived."""
        self._end_of_phase = self._end
        self._waited, self._num_bytes = 0.0, 0
        self._has_windows = True

    def seconds(self) -> float:
        """The seconds that the next byte may take. Raises AdapterUnavailableError if a limit is exceeded."""
        left = self._end_of_phase - time.monotonic()
        if left <= 0:
            raise AdapterUnavailableError("The source's answer takes too long.")
        if self._has_windows and self._waited >= self._timeouts.window:
            if self._num_bytes < self._timeouts.window_bytes:
                raise AdapterUnavailableError("The source's answer comes too slowly.")
            self._waited, self._num_bytes = 0.0, 0
        return min(self._timeouts.idle, left)

    def heard(self, num_bytes: int, seconds: float) -> None:
        """Called when `num_bytes` arrived after `seconds`."""
        self._num_bytes += num_bytes
        self._waited += seconds


def within(seconds: float, progress: Progress) -> Progress:
    """`progress`, aborting the transfer once it has taken `seconds`."""
    end = time.monotonic() + seconds

    def limited(num_bytes: int) -> None:
        if time.monotonic() > end:
            raise AdapterUnavailableError("The transfer takes too long.")
        progress(num_bytes)

    return limited


class TimedSocket:
    """A socket for `http.client.HTTPResponse` whose every read asks `clock` for its timeout."""

    def __init__(self, sock: socket.socket, clock: TransferClock) -> None:
        self._sock = sock
        self._clock = clock

    def makefile(self, mode: str) -> io.BufferedReader:
        """A stream that keeps the connection open until it is closed itself."""
        return io.BufferedReader(_TimedStream(self._sock, self._clock))


class _TimedStream(io.RawIOBase):
    def __init__(self, sock: socket.socket, clock: TransferClock) -> None:
        super().__init__()
        self._sock = sock
        self._clock = clock
        self._stream: Any = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._sock.settimeout(self._clock.seconds())
        started = time.monotonic()
        try:
            count = int(self._stream.readinto(buffer))
        except TimeoutError:
            self._clock.seconds()  # says so, if it was not the idle
            raise
        self._clock.heard(count, time.monotonic() - started)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
