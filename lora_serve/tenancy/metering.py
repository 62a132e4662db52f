"""Usage on its way to the journal: counted in memory, written in batches, and given to the other replicas.

A crash loses the counts since the last batch, `flush_seconds` at most. Nothing is ever counted twice: see
usage.py and shared.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.tenancy.long_reads import LongReads
from lora_serve.tenancy.usage import (
    DAY,
    Batch,
    UsageFigures,
    UsageJournal,
    UsageKey,
    UsageRow,
    add_to,
    coarser,
)

if TYPE_CHECKING:
    from lora_serve.tenancy.shared import UsageExchange

MAX_PENDING = 20_000  # rows that wait to be written; beyond that they are added up
SETTLING = 600.0  # seconds of uptime until the clock is believed: a machine that just booted may not have set it yet
_log = logging.getLogger(__name__)


class Meter:
    """`record` and `rows` on the event loop's thread; the journal is written on others."""

    def __init__(
        self,
        journal: UsageJournal | None,
        exchange: UsageExchange | None = None,
        config: AccountingConfig | None = None,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` None: counted in memory only. `exchange` None: there are no other replicas. `uptime`: seconds that
        nobody sets.
        """
        self.config = config or AccountingConfig()
        self.long_reads = LongReads("usage")
        self._journal = journal
        self._exchange = exchange
        self._clock = clock
        self._uptime = uptime
        self._believed_from = uptime() + SETTLING
        self._origin: float | None = None  # Unix seconds at which `uptime` was 0, once that is believed
        self._pending: Batch = {}
        self._writing: Batch = {}  # taken out of `_pending` and not known to be written
        self._number = journal.last_batch + 1 if journal is not None else 1
        self._is_failing = False
        self._is_exchange_away = False
        self._lock = asyncio.Lock()
        self._forgotten_on = 0  # the day on which old buckets were last removed

    def record(self, key: UsageKey, figures: UsageFigures) -> None:
        """Count. Never waits and never fails."""
        add_to(self._pending, self._bucket(), key, figures)
        if len(self._pending) > MAX_PENDING:
            self._pending = coarser(self._pending, MAX_PENDING // 2)

    async def keep_flushing(self) -> None:
        """Flushes again and again until it is cancelled."""
        while True:
            await asyncio.sleep(self.config.usage_flush_seconds)
            await self.flush()

    async def flush(self) -> None:
        """Write what was counted so far, and publish it for the other replicas. What fails is tried again next time."""
        if self._journal is None:
            return
        async with self._lock:
            await self._write(self._journal)
            await self._publish(self._journal)
            await self._forget(self._journal)

    async def rows(self, start: int, end: int, tenant: str | None = None) -> tuple[list[UsageRow], bool]:
        """All rows of the buckets from `start` up to, not including, `end`, and whether every replica's are there.
        `tenant` None: everybody's.
        """
        if self._journal is None:
            return self._unwritten(start, end, tenant), True
        async with self._lock:
            own = self._unwritten(start, end, tenant)
            own += await asyncio.to_thread(self._journal.rows, start, end, tenant)
        if self._exchange is None:
            return own, True
        try:
            others = partial(self._exchange.rows_of_others, start, end, tenant)
            return own + await self.long_reads.run(others), True
        except AdapterUnavailableError:
            return own, False

    async def close(self) -> None:
        """Writes the rest. What is recorded after that is lost."""
        await self.flush()
        for part in (self.long_reads, self._exchange, self._journal):
            if part is not None:
                part.close()

    def _unwritten(self, start: int, end: int, tenant: str | None) -> list[UsageRow]:
        counted = (*self._pending.items(), *self._writing.items())
        rows = ((bucket, key, figures) for (bucket, key), figures in counted)
        return [row for row in rows if start <= row[0] < end and tenant in (None, row[1].tenant)]

    def _bucket(self) -> int:
        return int(self._clock() // self.config.usage_bucket_seconds) * self.config.usage_bucket_seconds

    async def _write(self, journal: UsageJournal) -> None:
        """A batch that may have been written keeps its number and its content until that is known."""
        if not self._writing:
            self._writing, self._pending = self._pending, {}
        if not self._writing:
            return
        try:
            await asyncio.to_thread(journal.write, self._number, self._writing)
        except AdapterUnavailableError as error:
            if not self._is_failing:
                _log.error("usage is counted in memory only until it can be written: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
        self._writing = {}
        self._number += 1

    async def _publish(self, journal: UsageJournal) -> None:
        if self._exchange is None:
            return
        try:
            await asyncio.to_thread(self._exchange.publish, journal)
        except AdapterUnavailableError as error:
            if not self._is_exchange_away:
                _log.warning("%s They are kept here and follow later.", error)
            self._is_exchange_away = True
        else:
            self._is_exchange_away = False

    async def _forget(self, journal: UsageJournal) -> None:
        """Removes old buckets once a day, if the clock is believed."""
        now = self._believed_now()
        today = 0 if now is None else int(now) // DAY
        if today == self._forgotten_on:
            return
        try:
            await asyncio.to_thread(journal.forget, (today - self.config.usage_keep_days) * DAY)
        except AdapterUnavailableError:
            return
        self._forgotten_on = today

    def _believed_now(self) -> float | None:
        """Unix seconds; None: too early to say. A clock that is wrong at the start, or jumps a year ahead later, takes
        no usage with it: no more than a day's jump is believed.
        """
        uptime, now = self._uptime(), self._clock()
        if uptime < self._believed_from:
            return None
        if self._origin is None:
            self._origin = now - uptime
        return min(now, self._origin + uptime + DAY)


def summed(
    rows: Sequence[UsageRow], by: Callable[[int, UsageKey], tuple[str, ...]]
) -> dict[tuple[str, ...], UsageFigures]:
    """Sums of the rows by what `by` makes of bucket and key, in its order."""
    sums: dict[tuple[str, ...], UsageFigures] = {}
    for bucket, key, figures in rows:
        group = by(bucket, key)
        sums[group] = sums.get(group, UsageFigures()).plus(figures)
    return dict(sorted(sums.items()))
