"""The audit log: one line per admin act, only ever appended, each holding the digest of the one before.

    digest(n) = SHA-256(digest(n - 1) + line(n))

So a line that was changed, or removed from the middle, shows. That lines are missing at the end shows only to a reader
who noted a later digest: it is in the server's log, and with a shared registry in Redis.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from lora_serve.adapters.stores.database import Database, Schema, made_by
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.core.errors import AdapterUnavailableError

FILE_NAME = "audit.sqlite3"
FIRST = "0" * 64  # stands before the first line
_VERSION = 1
_SCHEMA = """
CREATE TABLE audit (number INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, line TEXT NOT NULL, digest TEXT NOT NULL);
CREATE INDEX audit_by_time ON audit (time_ms)
"""
_TITLE = "audit log"
_PRAGMAS = ("cache_size = -256",)  # KiB: it is appended to, and grows for ever


@dataclass(frozen=True, slots=True)
class Act:
    """An act of a caller, its subject and its outcome."""

    key: str  # id of the API key; "admin": the admin key
    tenant: str  # the caller's
    role: str
    action: str  # "POST /admin/adapters/{id}/pin"
    subject: str  # what the action was about: an adapter's id, a tenant, a key
    owner: str  # the tenant whose it is, "" if there is none or it is not known
    digest: str  # of the content that came or went, "" if there is none
    outcome: int  # the HTTP status; 499: the caller left before it was answered
    request_id: str


_UNREADABLE = asdict(Act("", "", "", "unreadable", "", "", "", 0, ""))


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line as it is kept."""

    replica: str
    number: int  # 1, 2, 3, ... per replica
    time_ms: int  # Unix milliseconds, never less than the line's before
    line: str  # an Act as JSON
    digest: str

    @property
    def id(self) -> str:
        """An id that sorts as the lines do."""
        return f"{self.time_ms:014d}-{self.replica[:8]}-{self.number:09d}"

    @property
    def act(self) -> dict[str, Any]:
        """The act; in place of one that cannot be read, one that says so and is no tenant's."""
        nothing = {"time_ms": self.time_ms, **_UNREADABLE}
        with suppress(ValueError, RecursionError):
            act = json.loads(self.line)
            if isinstance(act, dict) and all(type(act.get(name)) is type(value) for name, value in nothing.items()):
                return act if _is_time(act["time_ms"]) else nothing
        return nothing

    @property
    def is_sound(self) -> bool:
        """True if the act can be read and is of this time."""
        act = self.act
        return act["action"] != _UNREADABLE["action"] and bool(act["time_ms"] == self.time_ms)


Matches = Callable[[AuditLine], bool]


def first_matching(lines: Iterable[AuditLine], limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
    """The first lines that match, at most `limit`, with ids before `before`."""
    return list(islice((line for line in lines if (before is None or line.id < before) and matches(line)), limit))


class AuditJournal:
    """The file of this server's audit lines. May be called by any thread."""

    def __init__(
        self,
        store: Path,
        replica: str,
        clock: Callable[[], float] = time.time,
        monitor: StoreMonitor | None = None,
    ) -> None:
        """Open or make the file in the store. `monitor`: see Database. Raises ConfigError, DamagedFileError."""
        self._database = Database(store / FILE_NAME, Schema(_VERSION, made_by(_SCHEMA), _PRAGMAS), _TITLE, monitor)
        self._replica = replica
        self._clock = clock
        self._lock = threading.Lock()

    def append(self, act: Act) -> AuditLine:
        """Writes a line, durable on return. Raises AdapterUnavailableError."""
        with self._lock, self._database.transaction():
            query = "SELECT number, time_ms, line, digest FROM audit ORDER BY number DESC LIMIT 1"
            last = self._line(*(self._database.execute(query).fetchone() or (0, 0, "", FIRST)))
            time_ms = max(last.time_ms, int(1000 * self._clock()))
            line = json.dumps({"time_ms": time_ms, **asdict(act)}, sort_keys=True)
            row = (last.number + 1, time_ms, line, chained(last.digest, line))
            self._database.execute("INSERT INTO audit VALUES (?, ?, ?, ?)", row)
        return AuditLine(self._replica, *row)

    def lines(self, after: int = 0, limit: int = 1000) -> list[AuditLine]:
        """The lines after number `after`, oldest first."""
        return self._select("number > ? ORDER BY number LIMIT ?", (after, limit))

    def latest(self, before: int | None = None, limit: int = 1000) -> list[AuditLine]:
        """The newest lines (before number `before`, if given), newest first."""
        bound = 2**62 if before is None else before
        return self._select("number < ? ORDER BY number DESC LIMIT ?", (bound, limit))

    def last_until(self, time_ms: int) -> int:
        """The number of the last line that is not younger; 0: there is none."""
        found = self._select("time_ms <= ? ORDER BY time_ms DESC, number DESC LIMIT 1", (time_ms,))
        return found[0].number if found else 0

    @property
    def num_lines(self) -> int:
        """The number of lines. Raises AdapterUnavailableError."""
        last = self.latest(limit=1)
        return last[0].number if last else 0

    def broken(self) -> Iterator[int]:
        """The numbers of the lines that do not follow from the one before.

        Raises DamagedFileError for lines that cannot be read.
        """
        before, number = FIRST, 0
        while page := self._readable_lines(number):
            for line in page:
                follows = line.number == number + 1 and line.digest == chained(before, line.line)
                if not follows or line.act["time_ms"] != line.time_ms:
                    yield line.number
                before, number = line.digest, line.number

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _readable_lines(self, after: int) -> list[AuditLine]:
        try:
            return self.lines(after)
        except AdapterUnavailableError as error:
            raise self._database.damaged(error) from None

    def _select(self, where: str, values: Sequence[object]) -> list[AuditLine]:
        with self._lock:
            query = f"SELECT number, time_ms, line, digest FROM audit WHERE {where}"  # noqa: S608 - our own text
            return [self._line(*row) for row in self._database.select(query, values)]

    def _line(self, number: int, time_ms: object, text: object, digest: object) -> AuditLine:
        """A row of the table, whatever is in it."""
        line = AuditLine(self._replica, number, time_ms if _is_time(time_ms) else 0, str(text), str(digest))
        return line if line.time_ms else replace(line, time_ms=line.act["time_ms"])


def _is_time(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 10**14


def chained(before: str, line: str) -> str:
    """The digest of a line that follows the one with digest `before`."""
    return hashlib.sha256(f"{before}{line}".encode()).hexdigest()
