"""Every replica's audit lines in Redis, so that each can show all of them.

Keys: `<prefix>:audit:replicas`, a set of names, and `<prefix>:audit:<replica>`, a stream whose entry ids are
`<time_ms>-<number>`, so that an entry that is written twice is refused the second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from lora_serve.adapters.redis_connection import connect
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.tenancy.audit_journal import AuditJournal, AuditLine, Matches, first_matching

MAX_LINES = 100_000  # of each replica; its own file has all
_PAGE = 1000
_log = logging.getLogger(__name__)


class AuditExchange:
    """Blocking: not for the event loop's thread. Every method raises AdapterUnavailableError while Redis is away."""

    def __init__(self, url: str, prefix: str, replica: str, timeout: float = 2.0) -> None:
        """`timeout`: seconds for connecting and for each reply. Raises ConfigError for a URL that is not one."""
        self._redis = connect(url, timeout)
        self._prefix = f"{prefix}:audit:"
        self._replica = replica

    def publish(self, journal: AuditJournal) -> None:
        """Bring the lines that are not there yet."""
        with _readable_errors():
            self._redis.sadd(f"{self._prefix}replicas", self._replica)
            name = self._prefix + self._replica
            last = self._redis.xrevrange(name, count=1)
            number = _number(last[0][0]) if last else 0
            while page := journal.lines(number):
                pipe = self._redis.pipeline(transaction=False)
                for line in page:
                    fields = {"line": line.line, "digest": line.digest}
                    pipe.xadd(name, fields, id=f"{line.time_ms}-{line.number}", maxlen=MAX_LINES, approximate=True)
                pipe.execute(raise_on_error=False)
                number = page[-1].number

    def latest_of_others(self, limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
        """Of each other replica at most `limit` lines that match, newest first, whose id comes before `before`."""
        newest = "+" if before is None else str(int(before.partition("-")[0]))
        with _readable_errors():
            names = sorted(name.decode() for name in self._redis.smembers(f"{self._prefix}replicas"))
            found: list[AuditLine] = []
            for name in names:
                if name != self._replica:
                    found += first_matching(self._lines(name, newest), limit, before, matches)
            return found

    def close(self) -> None:
        self._redis.close()

    def _lines(self, replica: str, newest: str) -> Iterator[AuditLine]:
        """Newest first; `newest`: an entry's id, its time alone, or "+"."""
        while page := self._redis.xrevrange(self._prefix + replica, max=newest, count=_PAGE):
            for entry, fields in page:
                line, digest = fields[b"line"].decode(), fields[b"digest"].decode()
                yield AuditLine(replica, _number(entry), int(entry.split(b"-")[0]), line, digest)
            newest = f"({page[-1][0].decode()}"


def _number(entry: bytes) -> int:
    return int(entry.split(b"-")[1])


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError, ValueError, KeyError) as error:
        _log.debug("audit in redis: %r", error)
        raise AdapterUnavailableError("The shared audit log in Redis cannot be reached at present.", 5) from None
