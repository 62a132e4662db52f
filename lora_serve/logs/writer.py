"""Text to a descriptor, written by a thread of its own: a caller never waits for a reader, a terminal or a disk.

Python's own texts (print, tracebacks, progress bars) go to a `LogWriter` as well. Code in C writes to the descriptor
itself: a pipe or a terminal is opened once more for that, so that a full one is an error there and no wait. The flag
that says so belongs to an opened file, which is shared with other processes; hence one of our own.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MAX_TEXTS = 10_000  # that wait to be written
MAX_BYTES = 4 * 2**20
ATOMIC_BYTES = 4096  # PIPE_BUF: so many are written to a pipe together or not at all
_STDOUT, _STDERR = 1, 2
TICK = 1.0  # seconds between two looks when there is nothing to write, or when a write has failed


class LogWriter:
    """A bounded queue of texts and the thread that writes them.

    Texts that find the queue full are dropped and counted; once half of it is free a notice tells how many. After a
    fork the child begins with an empty queue.
    """

    def __init__(
        self,
        descriptor: int,
        notice: Callable[[int], str] = "{} records were dropped\n".format,
        *,
        max_texts: int = MAX_TEXTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`notice(num)` gives the text that tells how many texts were dropped."""
        self.descriptor = descriptor
        self.notice = notice
        self.on_idle: Callable[[], None] = lambda: None  # called on the writer's thread, about every TICK
        self.num_dropped = 0
        self._max_texts = max_texts
        self._max_bytes = max_bytes
        self._begin()

    def add(self, text: str, *, urgent: bool = False) -> None:
        """Queues `text`, or drops it if the queue is full; urgent texts may fill twice as much."""
        if self._process != os.getpid():
            self._begin()
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if not self._has_room(len(data), urgent):
                self.num_dropped += 1
                self._num_untold += 1
                return
            self._append(data)
            self._ensure_thread()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until all is written, `seconds` at most; True if it is. Does not wait for a descriptor that fails."""
        if self._process != os.getpid():
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._is_failing, seconds)
            return self._is_done

    def close(self) -> None:
        """Leave what waits, and return when nothing is written to the descriptor any more, whose reader has to go on
        or be gone.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def _is_done(self) -> bool:
        return not self._queue and not self._current

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0  # in the queue
        self._num_untold = 0  # dropped since the last notice
        self._current = b""  # out of the queue, and not written yet
        self._is_failing = self._is_closed = False
        self._thread: threading.Thread | None = None

    def _ensure_thread(self) -> None:
        """Starts the thread if it does not run; if the system has none to give, the next text tries again."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _has_room(self, num_bytes: int, urgent: bool) -> bool:
        """True if `text` fits. After a drop nothing fits until the notice is queued, so that one notice counts many."""
        if self._num_untold and not urgent:
            return False
        times = 2 if urgent else 1
        is_short = len(self._queue) >= times * self._max_texts
        return not is_short and self._num_bytes + num_bytes <= times * self._max_bytes

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self._num_bytes += len(data)

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                if self._is_done:
                    self._changed.wait(TICK)
                self._take()
            if self._current:
                self._write()
            with suppress(Exception):  # an exception must not end the thread, or the log ends
                self.on_idle()

    def _take(self) -> None:
        """The next texts, as many as are written together, and the notice if texts were dropped."""
        while self._queue and (not self._current or len(self._current) + len(self._queue[0]) <= ATOMIC_BYTES):
            data = self._queue.popleft()
            self._num_bytes -= len(data)
            self._current += data
        half_free = len(self._queue) <= self._max_texts // 2 and self._num_bytes <= self._max_bytes // 2
        if self._num_untold and half_free:
            self._append(self.notice(self._num_untold).encode())
            self._num_untold = 0

    def _write(self) -> None:
        """Writes what the descriptor takes now; the rest stays for the next call."""
        try:
            num_written, is_failing = os.write(self.descriptor, self._current), False
        except BlockingIOError:
            ready = select.poll()
            ready.register(self.descriptor, select.POLLOUT)
            ready.poll(TICK * 1000)
            return
        except OSError:  # no reader, or a full disk: tried again later
            num_written, is_failing = 0, True
        with self._changed:
            self._current, self._is_failing = self._current[num_written:], is_failing
            self._changed.notify_all()
        if is_failing:
            time.sleep(TICK)


def open_standard_descriptors() -> None:
    """Opens standard descriptors that were closed at the start on /dev/null, so that no file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(_STDOUT, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(_STDERR, "w", closefd=False)  # noqa: SIM115


def divert_streams() -> LogWriter:
    """Redirects `sys.stdout` and `sys.stderr` to the writer that is returned; makes the descriptors non-blocking."""
    for descriptor in (_STDOUT, _STDERR):
        _unblock(descriptor)
    writer = LogWriter(_STDERR)
    sys.stdout = sys.stderr = QueuedStream(writer)
    return writer


class QueuedStream(io.TextIOBase):
    """A text stream into a writer's queue."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def write(self, text: str) -> int:
        self._writer.add(text)
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._writer.descriptor)

    def fileno(self) -> int:
        return self._writer.descriptor


def _unblock(descriptor: int) -> None:
    """Makes the descriptor non-blocking; does nothing where that is impossible (a socket, another system)."""
    if sys.platform != "linux":
        return
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
            return
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return
    os.dup2(own, descriptor)
    os.close(own)
