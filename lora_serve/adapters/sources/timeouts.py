"""How long a source is waited for, however it spreads its bytes: drops of them hold no transfer for ever."""

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
    """Seconds, unless it says bytes."""

    idle: float = 20.0  # to connect, and without a byte
    headers: float = 30.0  # from a request to the end of its answer's headers
    total: float = 3600.0  # for all of a transfer
    window: float = 60.0  # in each of which so much must come:
    window_bytes: int = 2**16


DEFAULT_TIMEOUTS = Timeouts()


class TransferClock:
    """The time of one transfer. `timeouts.total` counts from its making, a window only while bytes are waited for."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._end = self._end_of_phase = time.monotonic() + timeouts.total
        self._waited, self._num_bytes = 0.0, 0  # in this window
        self._has_windows = False

    def begin_headers(self) -> None:
        """An answer is asked for."""
        self._end_of_phase = min(self._end, time.monotonic() + self._timeouts.headers)
        self._has_windows = False

    def begin_body(self) -> None:
        """Its headers are there."""
        self._end_of_phase = self._end
        self._waited, self._num_bytes = 0.0, 0
        self._has_windows = True

    def seconds(self) -> float:
        """How long the next byte may be waited for. Raises AdapterUnavailableError."""
        left = self._end_of_phase - time.monotonic()
        if left <= 0:
            raise AdapterUnavailableError("The source's answer takes too long.")
        if self._has_windows and self._waited >= self._timeouts.window:
            if self._num_bytes < self._timeouts.window_bytes:
                raise AdapterUnavailableError("The source's answer comes too slowly.")
            self._waited, self._num_bytes = 0.0, 0
        return min(self._timeouts.idle, left)

    def heard(self, num_bytes: int, seconds: float) -> None:
        """So much came, after so long a wait."""
        self._num_bytes += num_bytes
        self._waited += seconds


def within(seconds: float, progress: Progress) -> Progress:
    """`progress` that breaks the transfer off once it has taken `seconds`."""
    end = time.monotonic() + seconds

    def limited(num_bytes: int) -> None:
        if time.monotonic() > end:
            raise AdapterUnavailableError("The transfer takes too long.")
        progress(num_bytes)

    return limited


class TimedSocket:
    """What `http.client.HTTPResponse` reads from: a socket whose every read asks `clock` how long it may take."""

    def __init__(self, sock: socket.socket, clock: TransferClock) -> None:
        self._sock = sock
        self._clock = clock

    def makefile(self, mode: str) -> io.BufferedReader:
        """A stream of what comes. It keeps the connection open until it is closed itself."""
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
