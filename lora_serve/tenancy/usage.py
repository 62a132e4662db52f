"""Usage per tenant, adapter and key: the metered figures, which only grow, the use of one answer, and this server's own
sums in a file of its store.

A batch and its number are written in one transaction. So a batch that was written is never counted again, whether the
server died before or after it knew of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve.adapters.stores.database import Database, Schema, made_by
from lora_serve.adapters.stores.files import StoreMonitor

if TYPE_CHECKING:
    from lora_serve.core.messages import PromptEvent
    from lora_serve.core.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The tenant, key and adapter of a use. Names and versions of several adapters together are joined by "+"."""

    tenant: str
    adapter: str  # the base model's name for the base model
    version: str
    digest: str
    key: str = ""  # id of the API key; empty: no request (residency), or authentication is off


@dataclass(frozen=True, slots=True)
class UsageFigures:
    """Sums. Seconds are of sequences, so that two that ran side by side for a second count two."""

    requests: int = 0  # answers whose prompt was computed
    prompt_tokens: int = 0  # as `usage` in the answer has them
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    load_seconds: float = 0.0  # waiting for adapters
    compute_seconds: float = 0.0  # from the first scheduled chunk of the prompt to the last token
    residency_byte_seconds: float = 0.0  # of the adapter on the device

    def plus(self, other: UsageFigures) -> UsageFigures:
        return UsageFigures(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


HOUR, DAY = 3600, 86_400  # seconds
FIGURES = tuple(field.name for field in fields(UsageFigures))
KEY_FIELDS = tuple(field.name for field in fields(UsageKey))

Batch = dict[tuple[int, UsageKey], UsageFigures]  # by the bucket's first Unix second, and key
UsageRow = tuple[int, UsageKey, UsageFigures]


def add_to(batch: Batch, bucket: int, key: UsageKey, figures: UsageFigures) -> None:
    """Count figures in a batch."""
    known = batch.get((bucket, key))
    batch[bucket, key] = figures if known is None else known.plus(figures)


def coarser(batch: Batch, max_rows: int) -> Batch:
    """The same sums in fewer rows: those of an hour as one, or of a day; then without the API keys, then without the
    adapters' versions, and at last all of a tenant. Its tokens and seconds stay its own, whatever it comes to.
    """
    for seconds, rename in (
        (HOUR, lambda key: key),
        (DAY, lambda key: key),
        (DAY, lambda key: replace(key, key="")),
        (DAY, lambda key: replace(key, key="", version="", digest="")),
        (DAY, lambda key: UsageKey(key.tenant, "", "", "")),
    ):
        made: Batch = {}
        for (bucket, key), figures in batch.items():
            add_to(made, bucket - bucket % seconds, rename(key), figures)
        batch = made
        if len(batch) <= max_rows:
            break
    return batch


class AnswerUse:
    """The tokens and seconds of one answer, counted as the events of its rows come: shown in its `usage`, charged to
    quotas and metered. A prompt counts once, however many choices it has.
    """

    def __init__(
        self,
        requests: Sequence[InferenceRequest],
        choices_per_prompt: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests`: one per choice; those of one prompt stand beside one another."""
        self._requests = requests
        self._step = choices_per_prompt
        self._clock = clock
        self._num_cached = [0] * len(requests)  # per choice, of its prompt
        self._num_generated = [0] * len(requests)  # per choice
        self._choices = {request.request_id: choice for choice, request in enumerate(requests)}
        self._started_prompts: set[int] = set()  # a prompt has the number of its first choice
        self._seconds: dict[int, list[float]] = {}  # by choice with a prompt: in the queue, loading adapters, computing
        self._running: dict[int, float] = {}  # by choice: since when its prompt is computed

    @property
    def max_tokens(self) -> int:
        """The most tokens that the answer can use: its prompts, and for each choice what may be generated."""
        prompts = set(range(0, len(self._requests), self._step))
        return self._length(prompts) + sum(r.sampling.max_tokens for r in self._requests if r.pooling is None)

    @property
    def num_tokens(self) -> int:
        """The tokens used so far. A prompt counts as soon as its computation begins: a client that leaves just before
        the first token has had it computed, or most of it.
        """
        return self._length(self._started_prompts | self._computed_prompts()) + sum(self._num_generated)

    def started(self, request_id: str) -> None:
        """The first tokens of a choice's prompt are in a step."""
        self._started_prompts.add(self._prompt_of(self._choices[request_id]))

    def prompt_computed(self, choice: int, event: PromptEvent) -> None:
        """A choice's prompt is computed, some of its tokens were found in the prefix cache."""
        timings = event.timings
        self._running[choice] = self._clock()
        self._num_cached[choice] = event.num_cached_tokens
        self._seconds[choice] = [timings.queue, timings.load, timings.prefill]

    def generated(self, choice: int, num_tokens: int) -> None:
        """A choice got more tokens."""
        self._num_generated[choice] += num_tokens

    def ended(self, choice: int) -> None:
        """A choice has its last token, or its vector."""
        if (since := self._running.pop(choice, None)) is not None:
            self._seconds[choice][2] += self._clock() - since

    def lost(self, choice: int) -> None:
        """All that a choice used is lost with its engine, and nobody has seen any of it."""
        self._num_generated[choice] = self._num_cached[choice] = 0
        self._running.pop(choice, None)
        self._seconds.pop(choice, None)

    def all_lost(self) -> None:
        """The same for the whole answer."""
        self._started_prompts.clear()
        for choice in range(len(self._requests)):
            self.lost(choice)

    def counts(self, choice: int | None = None) -> tuple[int, int, int]:
        """Prompt tokens, generated tokens and cached prompt tokens of one choice, or of the answer.

        The answer's cached tokens are those of first choices: the others find what the first has just computed.
        """
        if choice is None:
            prompts = range(0, len(self._requests), self._step)
            return self._length(prompts), sum(self._num_generated), sum(self._num_cached[:: self._step])
        return self._length((choice,)), self._num_generated[choice], self._num_cached[choice]

    def figures(self) -> UsageFigures | None:
        """All of it, once the answer has ended in whatever way; None if no prompt was computed."""
        for choice in list(self._running):
            self.ended(choice)
        if not self._seconds:
            return None
        num_prompt_tokens = self._length(self._computed_prompts())
        num_cached = sum(self._num_cached[:: self._step])
        seconds = map(sum, zip(*self._seconds.values(), strict=True))
        return UsageFigures(1, num_prompt_tokens, num_cached, sum(self._num_generated), *seconds)

    def _computed_prompts(self) -> set[int]:
        return set(map(self._prompt_of, self._seconds))

    def _length(self, choices: Sequence[int] | set[int]) -> int:
        return sum(len(self._requests[choice].prompt_token_ids) for choice in choices)

    def _prompt_of(self, choice: int) -> int:
        return choice - choice % self._step


FILE_NAME = "usage.sqlite3"
_VERSION = 2
_COLUMNS = ", ".join((*KEY_FIELDS, *FIGURES))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
  bucket INTEGER NOT NULL, {", ".join(f"{name} TEXT NOT NULL" for name in KEY_FIELDS)},
  {", ".join(f"{name} NOT NULL" for name in FIGURES)}, is_published INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, {", ".join(KEY_FIELDS)})
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_to_publish ON usage (is_published) WHERE is_published = 0;
CREATE TABLE IF NOT EXISTS last_batch (number INTEGER NOT NULL);
INSERT INTO last_batch SELECT 0 WHERE NOT EXISTS (SELECT * FROM last_batch);
CREATE TABLE IF NOT EXISTS last_receipt (receipt TEXT NOT NULL)
"""  # noqa: S608 - names of fields
_ADD = (
    f"INSERT INTO usage (bucket, {_COLUMNS}) VALUES ({', '.join('?' * (1 + len(KEY_FIELDS) + len(FIGURES)))}) "  # noqa: S608 - names of fields
    f"ON CONFLICT (bucket, {', '.join(KEY_FIELDS)}) DO UPDATE SET is_published = 0, "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in FIGURES)
)
_READABLE = " AND ".join((
    "typeof(bucket) = 'integer' AND bucket BETWEEN 0 AND 253402300799",  # in the year 9999
    *(f"typeof({name}) = 'text'" for name in KEY_FIELDS),
    *(f"typeof({name}) IN ('integer', 'real') AND {name} BETWEEN 0 AND 1e300" for name in FIGURES),
))  # fmt: skip
_SELECT = f"SELECT bucket, {_COLUMNS} FROM usage WHERE {_READABLE} AND "  # noqa: S608 - names of fields
_UNREADABLE = f"SELECT bucket, {', '.join(KEY_FIELDS)} FROM usage WHERE NOT ({_READABLE}) LIMIT 10"  # noqa: S608
_MAX_PAGE = 1000
_PRAGMAS = ("cache_size = -256",)  # KiB: it is appended to, and grows for ever
_TITLE = "usage journal"
_log = logging.getLogger(__name__)


class UsageJournal:
    """The file of this server's usage. May be called by any thread."""

    def __init__(self, store: Path, monitor: StoreMonitor | None = None) -> None:
        """Open or make the file in the store. `monitor`: see Database. Raises ConfigError, DamagedFileError."""
        self._database = Database(store / FILE_NAME, Schema(_VERSION, made_by(_SCHEMA), _PRAGMAS), _TITLE, monitor)
        self._lock = threading.Lock()
        with self._database.checked():
            found = self._database.execute("SELECT number FROM last_batch WHERE typeof(number) = 'integer'")
            if found.fetchone() is None:
                raise self._database.damaged("the number of its last batch is gone")
            self._database.execute("SELECT receipt FROM last_receipt").fetchone()
            if rows := self._database.execute(_UNREADABLE).fetchall():
                named = "; ".join(" ".join(map(str, row)) for row in rows)
                _log.error("usage journal: rows that cannot be read are in no sum: %s", named)

    @property
    def last_batch(self) -> int:
        """The number of the last batch that was written."""
        with self._lock:
            return int(self._database.execute("SELECT number FROM last_batch").fetchone()[0])

    def write(self, number: int, batch: Batch) -> bool:
        """Add a batch, durably; False: this one, or a later one, was written before. Raises AdapterUnavailableError."""
        rows = [(bucket, *astuple(key), *astuple(figures)) for (bucket, key), figures in batch.items()]
        with self._lock, self._database.transaction():
            if self._database.execute("SELECT number FROM last_batch").fetchone()[0] >= number:
                return False
            self._database.executemany(_ADD, rows)
            self._database.execute("UPDATE last_batch SET number = ?", (number,))
        return True

    def rows(self, start: int, end: int, tenant: str | None = None) -> list[UsageRow]:
        """Rows of the buckets from `start` up to, not including, `end` (Unix seconds); `tenant` None: all tenants'."""
        query = f"{_SELECT} bucket >= ? AND bucket < ? AND tenant = coalesce(?, tenant)"
        with self._lock:
            found = self._database.select(query, (start, end, tenant))
        return [_row(row) for row in found]

    def unpublished(self) -> list[UsageRow]:
        """Some rows that changed since they were published."""
        with self._lock:
            found = self._database.select(f"{_SELECT} is_published = 0 LIMIT {_MAX_PAGE}")
        return [_row(row) for row in found]

    def published(self, rows: Sequence[UsageRow], receipt: str) -> None:
        """Marks rows, unless they have changed since, as published with `receipt`. Raises AdapterUnavailableError."""
        marks = [(bucket, *astuple(key), *astuple(figures)) for bucket, key, figures in rows]
        same = " AND ".join(f"{name} = ?" for name in ("bucket", *KEY_FIELDS, *FIGURES))
        with self._lock, self._database.transaction():
            self._database.executemany(f"UPDATE usage SET is_published = 1 WHERE {same}", marks)  # noqa: S608
            self._database.execute("DELETE FROM last_receipt")
            self._database.execute("INSERT INTO last_receipt VALUES (?)", (receipt,))

    @property
    def last_receipt(self) -> str | None:
        """The receipt of the last publication; None: nothing was published yet."""
        with self._lock:
            found = self._database.select("SELECT receipt FROM last_receipt")
        return str(found[0][0]) if found else None

    def publish_again(self, start: int) -> None:
        """Marks the buckets from `start` on as not published. Raises AdapterUnavailableError."""
        with self._lock, self._database.transaction():
            self._database.execute("UPDATE usage SET is_published = 0 WHERE bucket >= ?", (start,))

    def forget(self, before: int) -> None:
        """Removes the buckets before `before`. Raises AdapterUnavailableError."""
        with self._lock, self._database.transaction():
            self._database.execute("DELETE FROM usage WHERE bucket < ?", (before,))

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _row(row: Sequence[object]) -> UsageRow:
    split = 1 + len(KEY_FIELDS)
    key = UsageKey(*map(str, row[1:split]))
    figures = UsageFigures(*row[split:])  # type: ignore[arg-type]
    return int(str(row[0])), key, figures
