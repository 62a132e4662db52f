"""A key in the server's own Redis (--redis-url): a hash of files by name, or a tar, tar.gz or zip as a string."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.adapters.sources.base import CHUNK_BYTES, Intake, OnBytes, refuse, take_files
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import AdapterUnavailableError

_START = "redis://"
_log = logging.getLogger(__name__)


class RedisKeySource:
    """See AdapterSource. `source`: `redis://KEY`; the host is always the server's own Redis.

    One connection per fetch watches the key, so that two values are never mixed.
    """

    def __init__(self, url: str | None, own_prefix: str = "lora_serve", timeout: float = 10.0) -> None:
        """`own_prefix`: keys with it are the server's own and no sources. `timeout`: seconds. Raises ConfigError."""
        self._own_prefix = own_prefix
        self._redis: Any = None if url is None else _connect(url, timeout)

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        key = source[len(_START) :]
        if not key or "@" in key:
            raise refuse("`source` is redis://KEY, a key in the server's own Redis; no host, no credentials.")
        if key == self._own_prefix or key.startswith(self._own_prefix + ":"):
            raise refuse(f"Keys that begin with {self._own_prefix}: are the server's own.")
        if self._redis is None:
            raise refuse("redis:// is not taken: the server runs without --redis-url.")
        with _readable_errors(), self._watched(key) as connection:
            kind = connection.type(key)
            if kind == b"hash":
                take_files(_HashFields(connection, key), Intake(target, limit, progress))
            elif kind == b"string":
                with scratch_folder(target.parent) as scratch:
                    archive = scratch / "archive"
                    _read_string(connection, key, archive, Intake(scratch, limit, progress))
                    unpack(archive, target, limit)
            else:
                words = "is not there" if kind == b"none" else f"is a {kind.decode()}, not a hash or a string"
                raise refuse(f"The key {key[:200]!r} {words}.")
        return f"{_START}{key}"

    def close(self) -> None:
        if self._redis is not None:
            self._redis.close()

    @contextmanager
    def _watched(self, key: str) -> Iterator[Any]:
        import redis  # noqa: PLC0415 (an optional requirement)

        with closing(self._redis.pipeline()) as connection:
            connection.watch(key)
            yield connection
            connection.multi()
            connection.ping()
            try:
                connection.execute()
            except redis.WatchError:
                raise AdapterUnavailableError("The key was changed while it was read; try again.") from None


class _HashFields:
    """See NamedFiles. A field is read in one piece."""

    def __init__(self, connection: Any, key: str) -> None:
        self._connection = connection
        self._key = key

    def size(self, name: str) -> int | None:
        size = int(self._connection.hstrlen(self._key, name))
        return size if size or self._connection.hexists(self._key, name) else None

    def chunks(self, name: str) -> Iterator[bytes]:
        content = memoryview(self._connection.hget(self._key, name) or b"")
        for start in range(0, len(content), CHUNK_BYTES):
            yield bytes(content[start : start + CHUNK_BYTES])

    def checksum(self, name: str) -> None:
        """None: Redis has no checksums."""


def _read_string(connection: Any, key: str, archive: Path, intake: Intake) -> None:
    size = int(connection.strlen(key))
    intake.check_size(size)
    starts = range(0, size, CHUNK_BYTES)
    num_bytes = intake.write(archive, (connection.getrange(key, at, at + CHUNK_BYTES - 1) for at in starts))
    if num_bytes != size:
        raise AdapterUnavailableError("The key was changed while it was read; try again.")


def _connect(url: str, timeout: float) -> Any:
    from lora_serve.adapters.redis_connection import connect  # noqa: PLC0415 (an optional requirement)

    return connect(url, timeout)


@contextmanager
def _readable_errors() -> Iterator[None]:
    import redis  # noqa: PLC0415 (an optional requirement)

    try:
        yield
    except redis.RedisError as error:
        _log.warning("redis source: %r", error)
        raise AdapterUnavailableError("Redis cannot be read at present, or broke off; try again.") from None
