"""Records in Redis, for what replicas share. Keys, all under `<prefix>:<name>`, as in `lora_serve:registry`:

`...:position` a hash {epoch, generation}, `...:records` a hash key -> text, `...:changes` a stream with one entry per
commit, whose id is its generation and whose field `keys` is a JSON list of what it changed. A commit is WATCH, MULTI,
EXEC on the position, so no script is needed and it is there whole or not at all.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis

from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.redis_connection import connect
from lora_serve.core.errors import AdapterUnavailableError

MAX_CHANGES = 10_000  # commits that are remembered for replicas that were away
_LOAD_TRIES = 20
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
        """`timeout`: seconds for connecting and for each reply. `name`: in the keys; `title`: in messages.

        Raises ConfigError for a URL that is not one.
        """
        self._redis = connect(url, timeout)
        # Its own connection: while it blocks for news, commits go on.
        self._news = connect(url, timeout)
        self._position_key = f"{prefix}:{name}:position"
        self._records_key = f"{prefix}:{name}:records"
        self._changes_key = f"{prefix}:{name}:changes"
        self._timeout = timeout
        self._title = title

    def load(self) -> Page:
        """See Journal."""
        with self._readable_errors():
            pipe = self._redis.pipeline(transaction=True)
            pipe.hgetall(self._position_key)
            pipe.hgetall(self._records_key)
            position, records = pipe.execute()
            return Page(_position(position), {_text(key): _text(value) for key, value in records.items()})

    def since(self, position: Position) -> Page | None:
        """See Journal."""
        with self._readable_errors():
            pipe = self._redis.pipeline(transaction=True)
            pipe.hgetall(self._position_key)
            pipe.xrange(self._changes_key, min=f"({position.generation}-0")
            found, entries = pipe.execute()
            now = _position(found)
            is_complete = len(entries) == now.generation - position.generation
            if now.epoch != position.epoch or now.generation < position.generation or not is_complete:
                return None
            keys = sorted({key for _, fields in entries for key in json.loads(fields[b"keys"])})
            texts = self._redis.hmget(self._records_key, keys) if keys else []
            return Page(now, {key: text and _text(text) for key, text in zip(keys, texts, strict=True)})

    def commit(
        self, expected: Position, changes: Mapping[str, str | None], becomes: Position | None = None
    ) -> Position | None:
        """See Journal. Durable as far as Redis is: with its append-only file."""
        position = becomes or Position(expected.epoch or uuid.uuid4().hex, expected.generation + 1)
        with self._readable_errors(), self._redis.pipeline(transaction=True) as pipe:
            pipe.watch(self._position_key)
            if _position(pipe.hgetall(self._position_key)) != expected:
                return None
            pipe.multi()
            if not expected.epoch:  # what is left of a journal that lost its position
                pipe.delete(self._records_key, self._changes_key)
            self._write(pipe, position, changes)
            try:
                pipe.execute()
            except redis.WatchError:
                return None
        return position

    def wait(self, position: Position, seconds: float) -> None:
        """See Journal."""
        block = max(1, min(int(seconds * 1000), int(self._timeout * 500)))
        with self._readable_errors():
            self._news.xread({self._changes_key: f"{position.generation}-0"}, count=1, block=block)

    def forget(self) -> None:
        """See Journal."""
        with self._readable_errors():
            self._redis.xtrim(self._changes_key, maxlen=0, approximate=False)

    def close(self) -> None:
        """See Journal."""
        self._redis.close()
        self._news.close()

    def _write(self, pipe: Any, position: Position, changes: Mapping[str, str | None]) -> None:
        kept = {key: text for key, text in changes.items() if text is not None}
        gone = [key for key, text in changes.items() if text is None]
        if kept:
            pipe.hset(self._records_key, mapping=kept)
        if gone:
            pipe.hdel(self._records_key, *gone)
        pipe.hset(self._position_key, mapping={"epoch": position.epoch, "generation": position.generation})
        fields = {"keys": json.dumps(list(changes))}
        pipe.xadd(self._changes_key, fields, id=f"{position.generation}-0", maxlen=MAX_CHANGES, approximate=True)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError, ValueError, KeyError) as error:
            _log.debug("redis journal: %r", error)
            raise AdapterUnavailableError(
                f"The shared {self._title} in Redis cannot be reached at present.", retry_after=5
            ) from None


def _position(found: Mapping[bytes, bytes]) -> Position:
    if not found:
        return Position()
    return Position(_text(found[b"epoch"]), int(found[b"generation"]))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")
