"""Records in Redis, for what replicas share. Keys, all under `<prefix>:<name>`, as in `lora_serve:registry`:

`...:position` a hash {epoch, generation, head}, `...:records` a hash key -> text, `...:changes` a stream with one entry
per commit, whose id is its generation and whose field `keys` is a JSON list of what it changed, `...:heads` a hash of
the names of commits -> generation. A commit is WATCH, MULTI, EXEC on the position, so it is atomic without a script.

Position and records are the state; changes and heads tell followers how it came about. Foreign data in the latter two
is dropped and costs followers a reload of all records. Names that heads lost are read from changes. An unreadable
position is made anew over the same records.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import redis

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.journals.mirrored import MAX_HEADS
from lora_serve.adapters.redis_connection import connect, drop_other_type, readable_errors
from lora_serve.core.errors import AdapterUnavailableError

MAX_CHANGES = 10_000  # commits that are kept for replicas that were away
_TRIM = 1000  # commits between two trims of old names
_MAX_GENERATION = 2**62
_MAX_ATTEMPTS = 3  # of one commit, if its connection breaks
_log = logging.getLogger(__name__)


class RedisJournal:
    """See Journal."""

    def __init__(
        self,
        url: str,
        prefix: str = "lora_serve",
        timeout: float = 2.0,
        name: str = "registry",
        title: str = "adapter registry",
    ) -> None:
        """`timeout`: seconds for connecting and for each reply. `name`: part of the keys; `title`: for messages.

        Raises ConfigError for a URL that is not one.
        """
        self._redis = connect(url, timeout)
        # A connection of its own: it blocks until others commit while own commits go on.
        self._news = connect(url, timeout)
        self._position_key = f"{prefix}:{name}:position"
        self._records_key = f"{prefix}:{name}:records"
        self._changes_key = f"{prefix}:{name}:changes"
        self._heads_key = f"{prefix}:{name}:heads"
        self._timeout = timeout
        self._title = title

    def load(self) -> Page:
        with readable_errors(self._title):
            self._mend()
            pipe = self._redis.pipeline(transaction=True)
            for key in (self._position_key, self._records_key, self._heads_key):
                pipe.hgetall(key)
            pipe.xrange(self._changes_key, count=1)
            found, records, names, oldest = pipe.execute()
            texts = {_record(key): _record(value) for key, value in records.items()}
            position, heads = _position(found), _generations(names)
            if any(_text(fields.get(b"head", b"")) not in {"", *heads} for _, fields in oldest):  # that hash was lost
                heads = {**self._heads_by_changes(position), **heads}
            return Page(position, texts, heads)

    def since(self, position: Position) -> Page | None:
        with readable_errors(self._title):
            try:
                return self._since(position)
            except _NotOursError as error:
                _log.warning("the shared %s: %s; they are dropped", self._title, error)
                self._redis.delete(self._changes_key)
            except redis.ResponseError:  # of another type
                self._mend()
            return None

    def commit(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        becomes: Position | None = None,
        heads: Mapping[str, int] | None = None,
    ) -> Position | None:
        """Durable as far as Redis is: with its append-only file.

        A commit whose connection breaks before the answer comes is made again under its own name: either of the two
        can be executed, never both, and the name then tells that it was.
        """
        new = Position(expected.epoch or uuid.uuid4().hex, expected.generation + 1, uuid.uuid4().hex)
        position = new if becomes is None else replace(becomes, head=becomes.head or new.head)
        with readable_errors(self._title):
            for _ in range(_MAX_ATTEMPTS):
                with suppress(redis.WatchError):  # another was first, or the connection broke
                    return self._attempt(expected, changes, position, heads)
            raise redis.ConnectionError("the connection breaks at every commit")

    def _attempt(
        self,
        expected: Position,
        changes: Mapping[str, str | None],
        position: Position,
        heads: Mapping[str, int] | None,
    ) -> Position | None:
        """`position` once the commit is there, by an earlier attempt perhaps; None: another was first."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.watch(self._position_key, self._records_key)
            found = _position(pipe.hgetall(self._position_key))
            if found != expected:
                is_made = found == position or self._is_in_line(position)
                return position if is_made else None
            if pipe.type(self._records_key) not in (b"hash", b"none"):
                raise ValueError("the records are no hash")
            old = self._old_heads(position)
            pipe.multi()
            if not expected.epoch:  # the rest of a journal that lost its position
                pipe.delete(self._records_key, self._changes_key, self._heads_key)
            self._write(pipe, position, changes)
            if expected.epoch or heads is None:
                commit = _Commit(position.generation, expected.generation, list(changes), position.head)
                taken_in = {head: -number for head, number in (heads or {}).items()}
            else:  # restored as it was; nothing has changed
                commit = _Commit(position.generation, position.generation - 1, [], position.head)
                taken_in = dict(heads or {})
            hints = self._tell(pipe, commit, taken_in, old)
            results = pipe.execute(raise_on_error=False)
            answered = zip(hints, results[-len(hints) :], strict=True)
            failed = {key for key, result in answered if isinstance(result, Exception)}
        with suppress(AdapterUnavailableError):  # the commit itself is done
            self._drop(failed)
        return position

    def wait(self, position: Position, seconds: float) -> None:
        block = max(1, min(int(seconds * 1000), int(self._timeout * 500)))
        with readable_errors(self._title):
            self._news.xread({self._changes_key: f"{position.generation}-0"}, count=1, block=block)

    def forget(self) -> None:
        with readable_errors(self._title):
            self._redis.xtrim(self._changes_key, maxlen=0, approximate=False)

    def close(self) -> None:
        self._redis.close()
        self._news.close()

    def _is_in_line(self, position: Position) -> bool:
        """True if a commit of this name led to the journal's present state."""
        with suppress(redis.ResponseError):  # names of another type, which are dropped elsewhere
            return bool(self._redis.hget(self._heads_key, position.head) == b"%d" % position.generation)
        return False

    def _since(self, position: Position) -> Page | None:
        pipe = self._redis.pipeline(transaction=True)
        pipe.hgetall(self._position_key)
        pipe.xrange(self._changes_key, min=f"({position.generation}-0")
        pipe.hget(self._heads_key, position.head)
        found, entries, number = pipe.execute()
        now = _position(found)
        commits = [_Commit.of(entry, fields, now) for entry, fields in entries]
        if now.epoch != position.epoch or not _lead(commits, position.generation, now.generation):
            return None
        if position != now and position.head and number != b"%d" % position.generation:
            return None
        keys = sorted({key for commit in commits for key in commit.keys})
        texts = self._redis.hmget(self._records_key, keys) if keys else []
        heads = {commit.head: commit.generation for commit in commits if commit.head}
        return Page(
            now, {key: None if text is None else _record(text) for key, text in zip(keys, texts, strict=True)}, heads
        )

    def _heads_by_changes(self, position: Position) -> dict[str, int]:
        """The names that the list of changes has of the commits that led to `position`."""
        heads, generation = {}, position.generation
        try:
            entries = self._redis.xrange(self._changes_key, max=str(generation))
            commits = [_Commit.of(entry, fields, position) for entry, fields in entries]
        except _NotOursError:
            return {}
        for commit in reversed(commits):
            if commit.generation != generation:
                break
            heads[commit.head] = generation
            generation = commit.before
        heads.pop("", None)
        return heads if position.head in heads else {}

    def _write(self, pipe: Any, position: Position, changes: Mapping[str, str | None]) -> None:
        kept = {key: text for key, text in changes.items() if text is not None}
        gone = [key for key, text in changes.items() if text is None]
        if kept:
            pipe.hset(self._records_key, mapping=kept)
        if gone:
            pipe.hdel(self._records_key, *gone)
        pipe.hset(self._position_key, mapping=_fields_of(position))

    def _tell(self, pipe: Any, commit: _Commit, taken_in: Mapping[str, int], old: Sequence[bytes]) -> list[str]:
        """Adds the commands for followers; returns the keys of these last commands, whose failure undoes nothing."""
        pipe.hset(self._heads_key, mapping={**taken_in, commit.head: commit.generation})
        entry = f"{commit.generation}-0"
        pipe.xadd(self._changes_key, commit.fields(), id=entry, maxlen=MAX_CHANGES, approximate=True)
        if not old:
            return [self._heads_key, self._changes_key]
        pipe.hdel(self._heads_key, *old)
        return [self._heads_key, self._changes_key, self._heads_key]

    def _old_heads(self, position: Position) -> list[bytes]:
        """The names of commits that need not be kept any more."""
        if position.generation % _TRIM:
            return []
        floor = position.generation - MAX_HEADS
        return [head for head, number in self._redis.hgetall(self._heads_key).items() if abs(_number(number)) <= floor]

    def _drop(self, keys: set[str]) -> None:
        """Deletes keys that took no entry: they have another type, or a foreign id beyond the next one."""
        if keys:
            _log.warning("the shared %s: %s held what is not ours; dropped", self._title, ", ".join(sorted(keys)))
            with readable_errors(self._title):
                self._redis.delete(*keys)

    def _mend(self) -> None:
        """Drops keys of another type; makes an unreadable position anew over the records as they are."""
        drop_other_type(self._redis, self._changes_key, b"stream")
        drop_other_type(self._redis, self._heads_key, b"hash")
        records, position = self._redis.type(self._records_key), self._redis.type(self._position_key)
        if records not in (b"hash", b"none"):  # nothing is left: a replica with a copy restores it
            self._drop({self._records_key, self._position_key})
        elif not self._is_position(position, records):
            self._make_position()

    def _is_position(self, kind: bytes, records: bytes) -> bool:
        """True if the position's key is readable, beside records of type `records`."""
        if kind != b"hash":
            return kind == records == b"none"
        try:
            _position(self._redis.hgetall(self._position_key))
        except (ValueError, KeyError):
            return False
        return True

    def _make_position(self) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.watch(self._position_key, self._records_key)
            records = pipe.type(self._records_key)
            if self._is_position(pipe.type(self._position_key), records):
                return
            new = Position(uuid.uuid4().hex, 1, uuid.uuid4().hex)
            pipe.multi()
            pipe.delete(self._position_key, self._changes_key)
            if records == b"hash":
                pipe.hset(self._position_key, mapping=_fields_of(new))
                pipe.hset(self._heads_key, mapping={new.head: new.generation})
            try:
                pipe.execute()
            except redis.WatchError:
                return
        _log.warning("the shared %s had lost its position; its records are as they were", self._title)


class _NotOursError(Exception):
    """The list of changes has an entry that no commit wrote."""


def _position(found: Mapping[bytes, bytes]) -> Position:
    if not found:
        return Position()
    generation = int(found[b"generation"])
    if not 0 <= generation <= _MAX_GENERATION:
        raise ValueError("the generation is no number of commits")
    return Position(_text(found[b"epoch"]), generation, _text(found.get(b"head", b"")))


def _fields_of(position: Position) -> dict[str, str | int]:
    return {"epoch": position.epoch, "generation": position.generation, "head": position.head}


@dataclass(frozen=True, slots=True)
class _Commit:
    """An entry of the list of changes."""

    generation: int
    before: int  # the generation that it was made on; not the previous one if a branch was merged
    keys: list[str]
    head: str

    @classmethod
    def of(cls, entry: bytes, fields: Mapping[bytes, bytes], now: Position) -> _Commit:
        """Raises _NotOursError."""
        try:
            number, _, more = entry.partition(b"-")
            generation, keys = int(number), json.loads(fields[b"keys"])
            if more == b"0" and generation <= now.generation and all(isinstance(key, str) for key in keys):
                before = int(fields.get(b"before", generation - 1))
                return cls(generation, before, list(keys), _text(fields.get(b"head", b"")))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise _NotOursError("some of its changes are no commits")

    def fields(self) -> dict[str, str | int]:
        return {"keys": json.dumps(self.keys), "head": self.head, "before": self.before}


def _lead(commits: Sequence[_Commit], start: int, end: int) -> bool:
    """True if these are all the commits from one generation to the other."""
    for commit in commits:
        if commit.before != start:
            return False
        start = commit.generation
    return start == end


def _generations(heads: Mapping[bytes, bytes]) -> dict[str, int]:
    return {_text(head): _number(number) for head, number in heads.items() if _number(number)}


def _number(text: bytes) -> int:
    """The number; 0 for anything else."""
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) < 20 else 0


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def _record(value: bytes) -> str:
    """The record's text; an empty one, which cannot be read, for bytes that are none."""
    try:
        return _text(value)
    except UnicodeDecodeError:
        return ""
