"""The server's log handler: a record is formatted by the thread that logs it and written by another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextvars import Context

from lora_serve.logs.repeats import Repeats
from lora_serve.logs.writer import LogWriter

LAST_SECONDS = 1.0  # at most that a flush waits for the log's reader


class LogHandler(logging.Handler):
    """Sends formatted records to `writer`, repeated ones summed up. Only `flush` waits."""

    def __init__(self, writer: LogWriter, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.writer = writer
        self.repeats = Repeats(clock)
        writer.notice = self._notice
        writer.on_idle = self._tell_overdue

    @property
    def num_dropped(self) -> int:
        """Records that found the queue full."""
        return self.writer.num_dropped

    @property
    def num_held_back(self) -> int:
        """Records that were summed up with others like them."""
        return self.repeats.num_held

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for admitted in self.repeats.admitted(record):
                if admitted is record:
                    self.writer.add(self.format(record) + "\n", urgent=record.levelno >= logging.CRITICAL)
                else:
                    self._tell((admitted,))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all is written, LAST_SECONDS at most."""
        self.acquire()
        try:
            self._tell(self.repeats.overdue(all_of_them=True))
        finally:
            self.release()
        self.writer.flush(LAST_SECONDS)

    def _tell_overdue(self) -> None:
        """Logs the sums of periods that are over. Runs on the writer's thread, for which a flush waits with the lock
        held.
        """
        if self.lock is None or not self.lock.acquire(blocking=False):
            return
        try:
            self._tell(self.repeats.overdue())
        finally:
            self.lock.release()

    def _tell(self, sums: Iterable[logging.LogRecord]) -> None:
        """Logs sums of repeats, without the fields of any request."""
        for record in sums:
            self.writer.add(Context().run(self.format, record) + "\n")

    def _notice(self, count: int) -> str:
        message = "%d records were dropped: the log's reader did not take them in time"
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
        return Context().run(self.format, logging.makeLogRecord({**fields, "args": (count,)})) + "\n"


def flush_log() -> None:
    """Writes out what is queued; call it before `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
