"""The server's log handler: a record is formatted by the thread that logs it and written by another.

A few records of each kind are shown, the rest are counted and summed up in one line: a client could otherwise make the
server log the same thing ten thousand times, and a lasting fault does so by itself.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from dataclasses import dataclass

from lora_serve.logs.writer import LogWriter

BURST = 5  # records of a kind shown in a period
PERIOD = 10.0  # seconds
MAX_KINDS = 1000  # kinds counted at a time
# Loggers of which every level is limited: clients cause their records.
NOISY = frozenset(f"lora_serve.server.sockets.{name}" for name in ("client_faults", "connections", "http_runner"))
LAST_SECONDS = 1.0  # at most that a flush waits for the log's reader
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ONLY_PLACES = re.compile(r"[\s%srd.:,]*")  # a template such as "%s: %s" does not tell kinds apart
_MAX_KEY = 200  # characters

Kind = tuple[str, int, str, str]


@dataclass(slots=True)
class _Count:
    """The records of one kind in one period."""

    since: float
    num_shown: int = 0
    num_held: int = 0
    last: logging.LogRecord | None = None  # of the records held back


class Repeats:
    """The counts per kind of record. For one thread at a time; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float], *, burst: int = BURST, period: float = PERIOD) -> None:
        self.num_held = 0  # ever
        self._clock = clock
        self._burst = burst
        self._period = period
        self._counts: dict[Kind, _Count] = {}  # the oldest period first

    def admitted(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """The records to show now: this one unless its kind has used up its share, preceded by the sum of those held
        back.
        """
        if record.levelno < logging.WARNING and record.name not in NOISY:
            yield record
            return
        kind, now = kind_of(record), self._clock()
        count = self._counts.get(kind)
        if count is None or now - count.since >= self._period:
            yield from self._ended(kind)
            if len(self._counts) >= MAX_KINDS:
                yield from self._ended(next(iter(self._counts)))
            count = self._counts[kind] = _Count(now)
        if count.num_shown < self._burst:
            count.num_shown += 1
            yield record
        else:
            self.num_held += 1
            count.num_held += 1
            count.last = record

    def overdue(self, *, all_of_them: bool = False) -> Iterator[logging.LogRecord]:
        """The sums of the periods that are over, or of all periods."""
        now = self._clock()
        for kind, count in list(self._counts.items()):
            if not all_of_them and now - count.since < self._period:
                return
            yield from self._ended(kind)

    def _ended(self, kind: Kind) -> Iterator[logging.LogRecord]:
        count = self._counts.pop(kind, None)
        if count is not None and count.last is not None:
            yield _sum_of(count.last, count.num_held, self._clock() - count.since)


def kind_of(record: logging.LogRecord) -> Kind:
    """Logger, level, template without its numbers, and where the exception came from."""
    template = str(record.msg)
    if _ONLY_PLACES.fullmatch(template):
        template = record.getMessage()
    return record.name, record.levelno, _VARIABLE.sub("#", template[:_MAX_KEY]), _origin(record)


def _origin(record: logging.LogRecord) -> str:
    """File and line where the exception was raised, so that two bugs logged in one place are told apart."""
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    kind, _, traceback = record.exc_info
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}" if traceback is not None else ""
    return f"{kind.__name__} {place}"


def _sum_of(last: logging.LogRecord, count: int, seconds: float) -> logging.LogRecord:
    message = f"{last.getMessage()} (... {count} times more within {seconds:.0f} s)"
    return logging.LogRecord(last.name, last.levelno, "", 0, "%s", (message,), None)


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
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, (count,), None)
        return Context().run(self.format, record) + "\n"


def flush_log() -> None:
    """Writes out what is queued; call it before `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
