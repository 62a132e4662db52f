"""Every replica's audit lines in Redis, so that each can show all of them.

Keys: `<prefix>:audit:replicas`, a set of names, and `<prefix>:audit:<replica>`, a stream whose entry ids are
`<time_ms>-<number>`, so that an entry that is written twice is refused the second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from lora_serve.adapters.redis_connection import connect, drop_other_type, readable_errors
from lora_serve.tenancy.audit.journal import AuditJournal, AuditLine, Matches, first_matching

MAX_LINES = 100_000  # of each replica; its own file has all
_PAGE = 1000
_TITLE = "audit log"
_log = logging.getLogger(__name__)


class AuditExchange:
    """Blocking: not for the event loop's thread. Every method raises AdapterUnavailableError while Redis is away."""

    def __init__(self, url: str, prefix: str, replica: str, timeout: float = 2.0) -> None:
        """`timeout`: seconds for connecting and for each reply. Raises ConfigError for a URL that is not one."""
        self._redis = connect(url, timeout)
        self._prefix = f"{prefix}:audit:"
        self._replica = replica

    def publish(self, journal: AuditJournal) -> None:
        """Writes the lines that Redis does not have yet."""
        with readable_errors(_TITLE):
            drop_other_type(self._redis, f"{self._prefix}replicas", b"set")
            self._redis.sadd(f"{self._prefix}replicas", self._replica)
            if not self._tell(journal):  # somebody else's entry is in the way, or was and left its id
                _log.warning("the shared audit log held what is not ours; this server's lines are told again")
                self._redis.delete(self._prefix + self._replica)
                self._tell(journal)

    def latest_of_others(self, limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
        """The matching lines of the other replicas, at most `limit` of each, newest first, with ids before `before`."""
        newest = "+" if before is None else str(int(before.partition("-")[0]))
        with readable_errors(_TITLE):
            names = sorted(name.decode() for name in self._redis.smembers(f"{self._prefix}replicas"))
            found: list[AuditLine] = []
            for name in names:
                if name != self._replica:
                    found += first_matching(self._lines(name, newest), limit, before, matches)
            return found

    def close(self) -> None:
        self._redis.close()

    def _tell(self, journal: AuditJournal) -> bool:
        """Writes the lines after the last one in Redis. Returns False if an entry there is no line, or blocks them.

        A line of this replica that the journal does not have, or has otherwise, stays: it is evidence of a change.
        """
        drop_other_type(self._redis, self._prefix + self._replica, b"stream")
        last = self._last_number()
        if last < 0:
            return False
        number = last or max(0, journal.num_lines - MAX_LINES)
        while page := journal.lines(number):
            number = page[-1].number
            told = [line for line in page if line.is_sound]
            self._write(told)
            if told and self._last_number() < told[-1].number:
                return False
        return True

    def _last_number(self) -> int:
        """The number of the last line; 0: there is none; -1: the last entry is none."""
        for entry, fields in self._redis.xrevrange(self._prefix + self._replica, count=1):
            line = _line_of(self._replica, entry, fields)
            return -1 if line is None else line.number
        return 0

    def _write(self, page: list[AuditLine]) -> None:
        name, pipe = self._prefix + self._replica, self._redis.pipeline(transaction=False)
        for line in page:
            fields = {"line": line.line, "digest": line.digest}
            pipe.xadd(name, fields, id=f"{line.time_ms}-{line.number}", maxlen=MAX_LINES, approximate=True)
        pipe.execute(raise_on_error=False)

    def _lines(self, replica: str, newest: str) -> Iterator[AuditLine]:
        """Newest first; `newest`: an entry's id, its time alone, or "+". What is no line is left out."""
        while page := self._redis.xrevrange(self._prefix + replica, max=newest, count=_PAGE):
            for entry, fields in page:
                if (line := _line_of(replica, entry, fields)) is not None:
                    yield line
            newest = f"({page[-1][0].decode()}"


def _line_of(replica: str, entry: bytes, fields: Mapping[bytes, bytes]) -> AuditLine | None:
    """The entry as a line; None if no server has written it."""
    try:
        time_ms, number = map(int, entry.split(b"-"))
        line = AuditLine(replica, number, time_ms, fields[b"line"].decode(), fields[b"digest"].decode())
        is_ours = 0 < number < 2**62 and line.is_sound
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return line if is_ours else None
