"""Audit lines, usage and counts of a minute in Redis, where the replicas of one registry share them.

A replica writes only its own audit lines and its own sums of usage, and always their whole sums: writing one twice
changes nothing, and what Redis lost is written again. (A grow-only counter of replicas: Shapiro et al., "A
comprehensive study of Convergent and Commutative Replicated Data Types", INRIA RR-7506, 2011.) Keys:
`<prefix>:audit:replicas` and `<prefix>:usage:replicas`, sets of names; for each replica

- `<prefix>:audit:<replica>`, a stream whose entry ids are `<time_ms>-<number>`, so that an entry that is written twice
  is refused the second time;
- `<prefix>:usage:<replica>`, a receipt that says whether anything was lost since, and `<prefix>:usage:<replica>:<day>`,
  a hash [bucket, key...] -> [figures...] that expires when it is too old;

and `<prefix>:rate:<name>:<minute>`, by INCRBY, EXPIRE and GET in one transaction, no scripts.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import groupby
from typing import ClassVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lora_serve.adapters.redis_connection import connect, drop_other_type, readable_errors, said
from lora_serve.core.errors import ConfigError
from lora_serve.tenancy.audit_journal import AuditJournal, AuditLine, Matches, first_matching
from lora_serve.tenancy.rate_limiter import KEPT_MINUTES, Counts
from lora_serve.tenancy.usage import DAY, UsageFigures, UsageJournal, UsageKey, UsageRow

MAX_LINES = 100_000  # audit lines of each replica; its own file has all
_PAGE = 1000
_TIMEOUT = 2.0  # seconds for connecting and for each reply
_MAX_CONNECTIONS = 16  # more requests wait for one, which takes a fraction of a millisecond
_log = logging.getLogger(__name__)


class _Exchange:
    """What replicas show one another. Blocking: not for the event loop's thread. Every method raises
    AdapterUnavailableError while Redis is away.
    """

    kind: ClassVar[str]  # in the keys
    title: ClassVar[str]  # in errors

    def __init__(self, url: str, prefix: str, replica: str, *, timeout: float = _TIMEOUT) -> None:
        """`timeout`: seconds for connecting and for each reply. Raises ConfigError for a URL that is not one."""
        self._redis = connect(url, timeout)
        self._prefix = f"{prefix}:{self.kind}:"
        self._replicas = f"{self._prefix}replicas"
        self._replica = replica
        self._own = self._prefix + replica

    def close(self) -> None:
        self._redis.close()

    def _others(self) -> list[str]:
        """The names of the other replicas."""
        return sorted({name.decode() for name in self._redis.smembers(self._replicas)} - {self._replica})


class AuditExchange(_Exchange):
    """Every replica's audit lines, so that each can show all of them."""

    kind, title = "audit", "audit log"

    def publish(self, journal: AuditJournal) -> None:
        """Writes the lines that Redis does not have yet."""
        with readable_errors(self.title):
            drop_other_type(self._redis, self._replicas, b"set")
            self._redis.sadd(self._replicas, self._replica)
            if not self._append(journal):  # an entry of another writer is in the way, or was and left its id
                _log.warning("the shared audit log held what is not ours; this server's lines are told again")
                self._redis.delete(self._own)
                self._append(journal)

    def latest_of_others(self, limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
        """The matching lines of the other replicas, at most `limit` of each, newest first, with ids before `before`."""
        newest = "+" if before is None else str(int(before.partition("-")[0]))
        with readable_errors(self.title):
            lines = (first_matching(self._lines(name, newest), limit, before, matches) for name in self._others())
            return [line for found in lines for line in found]

    def _append(self, journal: AuditJournal) -> bool:
        """Writes the lines after the last one in Redis. Returns False if an entry there is no line, or blocks them.

        A line of this replica that the journal does not have, or has otherwise, stays: it is evidence of a change.
        """
        drop_other_type(self._redis, self._own, b"stream")
        last = self._last_number()
        if last < 0:
            return False
        number = last or max(0, journal.num_lines - MAX_LINES)
        while page := journal.lines(number):
            number = page[-1].number
            sound = [line for line in page if line.is_sound]
            self._write(sound)
            if sound and self._last_number() < sound[-1].number:
                return False
        return True

    def _last_number(self) -> int:
        """The number of the last line; 0: there is none; -1: the last entry is none."""
        for entry, fields in self._redis.xrevrange(self._own, count=1):
            line = _line_of(self._replica, entry, fields)
            return -1 if line is None else line.number
        return 0

    def _write(self, page: list[AuditLine]) -> None:
        name, pipe = self._own, self._redis.pipeline(transaction=False)
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


class UsageExchange(_Exchange):
    """Every replica's sums of usage, so that each can answer with all of them."""

    kind, title = "usage", "usage figures"

    def __init__(self, url: str, prefix: str, replica: str, keep_days: int, *, timeout: float = _TIMEOUT) -> None:
        super().__init__(url, prefix, replica, timeout=timeout)
        self._keep_days = keep_days

    def publish(self, journal: UsageJournal) -> None:
        """Writes the rows that changed in this replica's journal."""
        with readable_errors(self.title):
            self._check_receipt(journal)
            while rows := journal.unpublished():
                receipt = uuid.uuid4().hex
                self._write(rows, receipt)
                journal.published(rows, receipt)

    def rows_of_others(self, start: int, end: int, tenant: str | None = None) -> list[UsageRow]:
        """The other replicas' rows of the buckets from `start` to before `end`; `tenant` None: all tenants'."""
        with readable_errors(self.title):
            rows = (row for name in self._others() for row in self._rows(name, start, end))
            return [row for row in rows if tenant in (None, row[1].tenant)]

    def _check_receipt(self, journal: UsageJournal) -> None:
        """Marks all rows for publication if Redis lacks the newest receipt: it was emptied, or set back."""
        drop_other_type(self._redis, self._own, b"string")
        drop_other_type(self._redis, self._replicas, b"set")
        receipt, found = journal.last_receipt, self._redis.get(self._own)
        if receipt is not None and found != receipt.encode():
            journal.publish_again(int(time.time()) - self._keep_days * DAY)

    def _write(self, rows: Sequence[UsageRow], receipt: str) -> None:
        """Writes all rows or none."""
        days = {row[0] // DAY for row in rows}
        for day in days:
            drop_other_type(self._redis, f"{self._own}:{day}", b"hash")
        pipe = self._redis.pipeline(transaction=True)
        pipe.sadd(self._replicas, self._replica)
        pipe.set(self._own, receipt)
        for day, of_day in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0] // DAY):
            name = f"{self._own}:{day}"
            pipe.hset(name, mapping=dict(map(_record, of_day)))
            pipe.expireat(name, (day + 1 + self._keep_days) * DAY)
        pipe.execute()

    def _rows(self, replica: str, start: int, end: int) -> Iterator[UsageRow]:
        first = max(start, int(time.time()) - (self._keep_days + 1) * DAY) // DAY
        for day in range(first, min(end, int(time.time()) + DAY) // DAY + 1):
            for field, text in self._redis.hgetall(f"{self._prefix}{replica}:{day}").items():
                row = _row(field, text)
                if row is not None and start <= row[0] < end:
                    yield row


def _row(field: bytes, text: bytes) -> UsageRow | None:
    """The entry as a row; None if no server has written it."""
    try:
        bucket, *key = json.loads(field)
        figures = UsageFigures(*json.loads(text))
        is_sound = all(type(figure) in (int, float) and 0 <= figure < math.inf for figure in astuple(figures))
        return (bucket, UsageKey(*map(str, key)), figures) if isinstance(bucket, int) and is_sound else None
    except (ValueError, TypeError, RecursionError):
        return None


def _record(row: UsageRow) -> tuple[str, str]:
    bucket, key, figures = row
    return json.dumps([bucket, *astuple(key)]), json.dumps(astuple(figures))


class RedisCounters:
    """See RateCounters."""

    def __init__(self, url: str, prefix: str = "lora_serve", timeout: float = 0.5) -> None:
        """`timeout`: seconds for connecting and for each reply, which a request waits for. Raises ConfigError."""
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:
            raise ConfigError(f"--redis-url: {error}") from None
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        self._pool = pool
        self._prefix = f"{prefix}:rate:"

    async def add(self, amounts: Mapping[str, int], minute: int) -> Counts:
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                for name, amount in amounts.items():
                    pipe.incrby(f"{self._prefix}{name}:{minute}", amount)
                    pipe.expire(f"{self._prefix}{name}:{minute}", 60 * KEPT_MINUTES)
                    pipe.get(f"{self._prefix}{name}:{minute - 1}")
                replies = await pipe.execute()
        except (redis.RedisError, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: Redis {said(error)}") from None
        triples = zip(amounts, replies[::3], replies[2::3], strict=True)
        return {name: (int(before or 0), int(now)) for name, now, before in triples}

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()
