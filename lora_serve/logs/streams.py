"""Standard output and standard error of a server: nothing in the process waits for whoever reads them, or does not.

Python's own texts (print, tracebacks, progress bars) go to a `LogWriter`. Code in C writes to the descriptor itself: a
pipe or a terminal is opened once more for that, so that a full one is an error there and no wait. The flag that says so
belongs to an opened file, which is shared with other processes; hence one of our own.
"""

from __future__ import annotations

import io
import os
import stat
import sys

from lora_serve.logs.writer import LogWriter

_STDOUT, _STDERR = 1, 2


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
