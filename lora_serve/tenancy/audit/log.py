"""The audit log as the web uses it: a line is durable before the answer goes out, and all replicas' lines are shown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from lora_serve.adapters.redis_connection import connect, drop_other_type, readable_errors
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.tenant import Role
from lora_serve.tenancy.audit.journal import Act, AuditJournal, AuditLine, Matches, first_matching
from lora_serve.tenancy.long_reads import LongReads

_log = logging.getLogger(__name__)
_PAGE = 1000
MAX_REFUSED = 60  # of a tenant within a minute
_TOO_MANY = 429  # nobody looked at what it was about
_CLIENT_LEFT = 499  # the act may have been done


@dataclass(frozen=True, slots=True)
class AuditPage:
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

    async def page(self, limit: int, before: str | None, matches: Matches) -> AuditPage:
        """The newest lines of all replicas that match, at most `limit`, with ids before `before`."""
        others, is_complete = await self._others(limit + 1, before, matches)
        found = [*others, *await self._reads.run(lambda: first_matching(self._own(before), limit + 1, before, matches))]
        found.sort(key=lambda line: line.id, reverse=True)
        return AuditPage(found[:limit], len(found) > limit, is_complete)

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


MAX_LINES = 100_000  # of each replica; its own file has all
_TITLE = "audit log"


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
