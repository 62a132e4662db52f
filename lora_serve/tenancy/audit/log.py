"""The audit log as the web uses it: a line is durable before the answer goes out, and all replicas' lines are shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.tenancy.audit.flood import RefusedActs
from lora_serve.tenancy.audit.journal import Act, AuditJournal, AuditLine, Matches, first_matching

_log = logging.getLogger(__name__)
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Lines, newest first."""

    lines: list[AuditLine]
    has_more: bool
    is_complete: bool  # whether the other replicas' lines are among them


class Exchange(Protocol):
    """Where replicas show one another their lines. Blocking; raises AdapterUnavailableError."""

    def publish(self, journal: AuditJournal) -> None:
        """Bring the lines that are not there yet."""

    def latest_of_others(self, limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
        """Of each other replica at most `limit` lines that match, newest first, whose id comes before `before`."""

    def close(self) -> None:
        """Give back what is held."""


class AuditLog:
    """On the event loop's thread; files and Redis on others."""

    def __init__(
        self, journal: AuditJournal | None, exchange: Exchange | None = None, refused: RefusedActs | None = None
    ) -> None:
        """`journal` None: nothing is kept. `exchange` None: there are no other replicas."""
        self._refused = refused or RefusedActs()
        self._journal = journal
        self._exchange = exchange
        self._publishing: asyncio.Task[None] | None = None
        self._is_stale = False

    async def append(self, act: Act) -> None:
        """Durable on return, but for what a tenant is refused again and again. Raises AdapterUnavailableError."""
        if self._journal is None or self._refused.is_one_too_many(act):
            return
        line = await asyncio.to_thread(self._journal.append, act)
        _log.info("audit %d %s %s %s %d", line.number, line.digest, act.action, act.subject or "-", act.outcome)
        self.publish()

    def publish(self) -> None:
        """Tell the other replicas, beside whatever else is done."""
        if self._exchange is None or self._journal is None:
            return
        self._is_stale = True
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.ensure_future(self._publish(self._journal, self._exchange))

    async def page(self, limit: int, before: str | None, matches: Matches) -> AuditPage:
        """At most `limit` lines that match, those whose id comes before `before`."""
        others, is_complete = await self._others(limit + 1, before, matches)
        found = [*others, *await asyncio.to_thread(self._own_matching, limit + 1, before, matches)]
        found.sort(key=lambda line: line.id, reverse=True)
        return AuditPage(found[:limit], len(found) > limit, is_complete)

    async def close(self) -> None:
        if self._publishing is not None:
            await self._publishing
        for part in (self._exchange, self._journal):
            if part is not None:
                part.close()

    async def _publish(self, journal: AuditJournal, exchange: Exchange) -> None:
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
            return await asyncio.to_thread(self._exchange.latest_of_others, limit, before, matches), True
        except AdapterUnavailableError:
            return [], False

    def _own_matching(self, limit: int, before: str | None, matches: Matches) -> list[AuditLine]:
        return first_matching(self._own(), limit, before, matches)

    def _own(self) -> Iterator[AuditLine]:
        """Newest first."""
        number: int | None = None
        while self._journal is not None and (page := self._journal.latest(number, _PAGE)):
            yield from page
            number = page[-1].number
