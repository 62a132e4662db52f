"""Every replica's sums of usage in Redis, so that each can tell all of them.

A replica writes only its own rows, and always their whole sums: writing one twice changes nothing, and what Redis lost
is written again. (A grow-only counter of replicas: Shapiro et al., "A comprehensive study of Convergent and Commutative
Replicated Data Types", INRIA RR-7506, 2011.) Keys: `<prefix>:usage:replicas`, a set of names; for each replica
`<prefix>:usage:<replica>`, a receipt that says whether anything was lost since, and `<prefix>:usage:<replica>:<day>`, a
hash [bucket, key...] -> [figures...] that expires when it is too old.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import groupby

from lora_serve.adapters.redis_connection import connect, drop_other_type, readable_errors
from lora_serve.tenancy.usage.figures import UsageFigures, UsageKey, UsageRow
from lora_serve.tenancy.usage.journal import UsageJournal

DAY = 86_400
_TITLE = "usage figures"


class UsageExchange:
    """Blocking: not for the event loop's thread. Every method raises AdapterUnavailableError while Redis is away."""

    def __init__(
        self,
        url: str,
        prefix: str,
        replica: str,
        keep_days: int,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`timeout`: seconds for connecting and for each reply. Raises ConfigError for a URL that is not one."""
        self._redis = connect(url, timeout)
        self._prefix = f"{prefix}:usage:"
        self._replica = replica
        self._keep_days = keep_days
        self._clock = clock

    def publish(self, journal: UsageJournal) -> None:
        """Writes the rows that changed in this replica's journal."""
        with readable_errors(_TITLE):
            self._check_receipt(journal)
            while rows := journal.unpublished():
                receipt = uuid.uuid4().hex
                self._write(rows, receipt)
                journal.published(rows, receipt)

    def rows_of_others(self, start: int, end: int, tenant: str | None = None) -> list[UsageRow]:
        """The other replicas' rows of the buckets from `start` to before `end`; `tenant` None: all tenants'."""
        with readable_errors(_TITLE):
            names = sorted(name.decode() for name in self._redis.smembers(f"{self._prefix}replicas"))
            found: list[UsageRow] = []
            for name in names:
                if name != self._replica:
                    found += self._rows(name, start, end)
            return [row for row in found if tenant in (None, row[1].tenant)]

    def close(self) -> None:
        self._redis.close()

    def _check_receipt(self, journal: UsageJournal) -> None:
        """Marks all rows for publication if Redis lacks the newest receipt: it was emptied, or set back."""
        drop_other_type(self._redis, self._prefix + self._replica, b"string")
        drop_other_type(self._redis, f"{self._prefix}replicas", b"set")
        receipt, found = journal.last_receipt, self._redis.get(self._prefix + self._replica)
        if receipt is not None and found != receipt.encode():
            journal.publish_again(int(self._clock()) - self._keep_days * DAY)

    def _write(self, rows: Sequence[UsageRow], receipt: str) -> None:
        """Writes all rows or none."""
        days = {row[0] // DAY for row in rows}
        for day in days:
            drop_other_type(self._redis, f"{self._prefix}{self._replica}:{day}", b"hash")
        pipe = self._redis.pipeline(transaction=True)
        pipe.sadd(f"{self._prefix}replicas", self._replica)
        pipe.set(self._prefix + self._replica, receipt)
        for day, of_day in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0] // DAY):
            name = f"{self._prefix}{self._replica}:{day}"
            pipe.hset(name, mapping=dict(map(_record, of_day)))
            pipe.expireat(name, (day + 1 + self._keep_days) * DAY)
        pipe.execute()

    def _rows(self, replica: str, start: int, end: int) -> Iterator[UsageRow]:
        first = max(start, int(self._clock()) - (self._keep_days + 1) * DAY) // DAY
        for day in range(first, min(end, int(self._clock()) + DAY) // DAY + 1):
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
