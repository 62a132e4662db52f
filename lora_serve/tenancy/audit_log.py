"""The audit log as the web uses it: a line is durable before the answer goes out, and all replicas' lines are shown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.tenant import Role
from lora_serve.tenancy.audit_journal import Act, AuditJournal, AuditLine, Matches, first_matching
from lora_serve.tenancy.long_reads import LongReads

if TYPE_CHECKING:
    from lora_serve.tenancy.shared import AuditExchange

_log = logging.getLogger(__name__)
_PAGE = 1000
MAX_REFUSED = 60  # of a tenant within a minute
_TOO_MANY = 429  # its subject was not looked at
_CLIENT_LEFT = 499  # the act may have been done


@dataclass(frozen=True, slots=True)
class AuditLines:
    """Lines, newest first."""

    lines: list[AuditLine]
    has_more: bool
    is_complete: bool  # whether the other replicas' lines are among them


class RefusedActs:
    """Counts a tenant's refused acts within a minute; beyond MAX_REFUSED they need not be noted any more.

    A refused act costs its sender nothing and the server a flushed line, here and in Redis. A caller that may do
    nothing at all must not be able to fill the disk, or to push the others' lines out of Redis.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._minute = 0
        self._counts: Counter[tuple[str, bool]] = Counter()

    def is_one_too_many(self, act: Act) -> bool:
        """True if the act was refused and MAX_REFUSED of its tenant's refused acts were noted in this minute.

        An admin's refused act counts only if it was refused for coming too often.
        """
        was_refused = act.role in (Role.INFERENCE, Role.METRICS) or 400 <= act.outcome < _CLIENT_LEFT
        is_exempt = act.role == Role.ADMIN and act.outcome != _TOO_MANY
        if is_exempt or not was_refused:
            return False
        if (minute := int(self._clock() // 60)) != self._minute:
            self._minute, self._counts = minute, Counter()
        sender = (act.tenant, act.role == Role.ADMIN)
        self._counts[sender] += 1
        return self._counts[sender] > MAX_REFUSED


class AuditLog:
    """The audit log of all replicas. Used on the event loop's thread; files and Redis are used on others."""

    def __init__(
        self, journal: AuditJournal | None, exchange: AuditExchange | None = None, refused: RefusedActs | None = None
    ) -> None:
        """`journal` None: nothing is kept. `exchange` None: there are no other replicas."""
        self._refused = refused or RefusedActs()
        self._journal = journal
        self._exchange = exchange
        self._reads = LongReads("audit")
        self._publishing: asyncio.Task[None] | None = None
        self._is_stale = False

    async def append(self, act: Act) -> None:
        """Writes a line, durable on return; drops refused acts beyond MAX_REFUSED. Raises AdapterUnavailableError."""
        if self._journal is None or self._refused.is_one_too_many(act):
            return
        line = await asyncio.to_thread(self._journal.append, act)
        _log.info("audit %d %s %s %s %d", line.number, line.digest, act.action, act.subject or "-", act.outcome)
        self.publish()

    def publish(self) -> None:
        """Starts to show the other replicas the new lines, in the background."""
        if self._exchange is None or self._journal is None:
            return
        self._is_stale = True
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.ensure_future(self._publish(self._journal, self._exchange))

    async def page(self, limit: int, before: str | None, matches: Matches) -> AuditLines:
        """The newest lines of all replicas that match, at most `limit`, with ids before `before`."""
        others, is_complete = await self._others(limit + 1, before, matches)
        found = [*others, *await self._reads.run(lambda: first_matching(self._own(before), limit + 1, before, matches))]
        found.sort(key=lambda line: line.id, reverse=True)
        return AuditLines(found[:limit], len(found) > limit, is_complete)

    async def close(self) -> None:
        if self._publishing is not None:
            await self._publishing
        for part in (self._reads, self._exchange, self._journal):
            if part is not None:
                part.close()

    async def _publish(self, journal: AuditJournal, exchange: AuditExchange) -> None:
        while self._is_stale:
            self._is_stale = False
            try:
                await asyncio.to_thread(exchange.publish, journal)
            except AdapterUnavailableError as error:
                _log.warning("%s The lines are kept here and follow with the next.", error)

    async def _others(self, limit: int, before: str | None, matches: Matches) -> tuple[list[AuditLine], bool]:
        if self._exchange is None:
            return [], True
        try:
            return await self._reads.run(partial(self._exchange.latest_of_others, limit, before, matches)), True
        except AdapterUnavailableError:
            return [], False

    def _own(self, before: str | None) -> Iterator[AuditLine]:
        """This server's lines, newest first; with `before` none that is younger than that id's."""
        if self._journal is None:
            return
        number = None if before is None else self._journal.last_until(int(before.partition("-")[0])) + 1
        while page := self._journal.latest(number, _PAGE):
            yield from page
            number = page[-1].number
