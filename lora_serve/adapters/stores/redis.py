"""Adapter files in Redis, shared by replicas: chunks of 1 MiB, then a manifest that makes them visible.

Keys: `<prefix><hex>:<file>:<number>` hold chunks, `<prefix><hex>:manifest` a JSON object file -> {size, chunks},
`<prefix><hex>:records` a hash of the records of the blob.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from lora_serve.adapters.checkpoint.content import CONFIG_NAME, OPTIONAL_NAMES, WEIGHTS_NAME, content_names
from lora_serve.adapters.redis_connection import connect, drop_other_type, said
from lora_serve.adapters.regular_file import CHUNK_BYTES, open_regular, pieces_of
from lora_serve.adapters.stores.base import Records
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import AdapterUnavailableError

MAX_FILE_BYTES = 2**36  # of one file of an adapter
UPLOAD_SECONDS = 3600  # chunks without a manifest expire: a crash leaves nothing behind
_PAGE = 500  # hashes that are asked for at once
_NEEDED = (CONFIG_NAME, WEIGHTS_NAME)
_Manifest = dict[str, dict[str, int]]  # file name -> {"size": bytes, "chunks": count}
_log = logging.getLogger(__name__)


class RedisStore:
    """See AdapterStore. All writes are idempotent, so two replicas may write the same digest at once."""

    def __init__(
        self, url: str, prefix: str = "lora_serve:adapters:", timeout: float = 5.0, tmp: Path | None = None
    ) -> None:
        """`timeout`: seconds for connecting and for each reply. `tmp`: the folder for fetched files while in use; None,
        or no room there: the system's own. Raises ConfigError for a URL that is not one.
        """
        self._redis = connect(url, timeout)
        self._prefix = prefix
        self._tmp = tmp

    def put(self, digest: str, folder: Path) -> None:
        """Reads what is there already, and replaces what is damaged."""
        with _readable_errors():
            manifest = {name: self._write_file(digest, folder / name) for name in content_names(folder)}
            keys = self._chunk_keys(digest, manifest)
            for key in keys:
                self._redis.persist(key)
            if not self._has_all(keys):
                raise AdapterUnavailableError("Redis dropped a part of the adapter while it was being written.")
            self._redis.set(self._key(digest, "manifest"), json.dumps(manifest))

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """Fetches the files into a temporary folder."""
        with ExitStack() as stack:
            with _readable_errors():
                folder = self._fetch(digest, stack)
            yield folder

    def has(self, digest: str) -> bool:
        with _readable_errors():
            return self._manifest(digest) is not None

    def delete(self, digest: str) -> None:
        """Deletes the manifest first, so that half a blob is never seen."""
        with _readable_errors():
            self._redis.delete(self._key(digest, "manifest"))
            for key in list(self._redis.scan_iter(match=self._key(digest, "*"), count=1000)):
                self._redis.unlink(key)

    def digests(self) -> frozenset[str]:
        start = len(self._prefix)
        with _readable_errors():
            keys = [key.decode() for key in self._redis.scan_iter(match=f"{self._prefix}*:manifest", count=1000)]
        return frozenset("sha256:" + key[start:].partition(":")[0] for key in keys)

    def release(self, digest: str) -> None:
        """A no-op: there is no copy on this machine."""

    def records(self, digests: Collection[str]) -> dict[str, dict[str, str]]:
        """Also returns records of blobs that are not here."""
        asked, found = list(digests), {}
        with _readable_errors():
            for start in range(0, len(asked), _PAGE):
                pipe = self._redis.pipeline(transaction=False)
                for digest in asked[start : start + _PAGE]:
                    pipe.hgetall(self._key(digest, "records"))
                for digest, texts in zip(asked[start : start + _PAGE], pipe.execute(), strict=True):
                    found[digest] = {_text(key): _text(value) for key, value in texts.items()}
        return found

    @contextmanager
    def staging(self, records: Mapping[str, Records]) -> Iterator[Callable[[], None]]:
        """Does not reserve room."""

        def publish() -> None:
            with _readable_errors():
                for digest, texts in records.items():
                    if texts:
                        self._redis.hset(self._key(digest, "records"), mapping=dict(texts))

        yield publish

    def remove_record(self, digest: str, key: str, tombstone: bool) -> None:
        """Leaves no tombstone, as this store is never swept."""
        with _readable_errors():
            self._redis.hdel(self._key(digest, "records"), key)

    def close(self) -> None:
        self._redis.close()

    def _key(self, digest: str, *parts: object) -> str:
        return ":".join([self._prefix + digest.removeprefix("sha256:"), *map(str, parts)])

    def _chunk_keys(self, digest: str, manifest: _Manifest) -> list[str]:
        return [self._key(digest, name, number) for name, file in manifest.items() for number in range(file["chunks"])]

    def _manifest(self, digest: str) -> _Manifest | None:
        """The manifest; None if it is missing or broken, or if a chunk was evicted."""
        manifest = _parse_manifest(self._text(self._key(digest, "manifest")))
        return manifest if manifest and self._has_all(self._chunk_keys(digest, manifest)) else None

    def _text(self, key: str) -> bytes | None:
        """The value; None also for a key of another type, which the next `put` overwrites."""
        if self._redis.type(key) not in (b"string", b"none"):
            return None
        found: bytes | None = self._redis.get(key)
        return found

    def _has_all(self, keys: list[str]) -> bool:
        return not keys or self._redis.exists(*keys) == len(keys)

    def _write_file(self, digest: str, path: Path) -> dict[str, int]:
        size = chunks = 0
        with open_regular(path) as file:
            for chunk in pieces_of(file):
                self._write_chunk(self._key(digest, path.name, chunks), chunk)
                size, chunks = size + len(chunk), chunks + 1
        return {"size": size, "chunks": chunks}

    def _write_chunk(self, key: str, chunk: bytes) -> None:
        """Leaves the expiry of a chunk that is there: another replica may have lifted it already."""
        drop_other_type(self._redis, key, b"string")
        found = self._redis.get(key)
        if found is None:
            self._redis.set(key, chunk, ex=UPLOAD_SECONDS, nx=True)  # nx: what another replica writes is the same
        elif found != chunk:
            self._redis.set(key, chunk, keepttl=True)

    def _fetch(self, digest: str, stack: ExitStack) -> Path:
        """The files in a folder that is removed when `stack` is closed."""
        if self._tmp is not None:
            try:
                with ExitStack() as tried:
                    folder = tried.enter_context(scratch_folder(self._tmp))
                    self._read(digest, folder)
                    stack.push(tried.pop_all())
                    return folder
            except OSError as error:
                _log.warning("%s is fetched to the system's temporary folder: %r", digest, error)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora_serve-")))
        self._read(digest, folder)
        return folder

    def _read(self, digest: str, folder: Path) -> None:
        manifest = self._manifest(digest)
        if manifest is None:
            raise AdapterUnavailableError(f"The adapter store does not have {digest}.")
        for name in manifest:
            with (folder / name).open("wb") as file:
                for number in range(manifest[name]["chunks"]):
                    wanted = min(CHUNK_BYTES, manifest[name]["size"] - file.tell())
                    chunk = self._redis.getrange(self._key(digest, name, number), 0, wanted)  # one byte more would show
                    if len(chunk) != wanted:
                        raise AdapterUnavailableError(f"Redis has lost a part of {digest}.")
                    file.write(chunk)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _parse_manifest(text: bytes | None) -> _Manifest | None:
    try:
        table = json.loads(text or b"null")
        names = (*_NEEDED, *(name for name in OPTIONAL_NAMES if name in table))
        manifest = {name: {key: int(table[name][key]) for key in ("size", "chunks")} for name in names}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return manifest if all(_is_possible(file) for file in manifest.values()) else None


def _is_possible(file: dict[str, int]) -> bool:
    """False for a manifest that claims, say, a billion chunks, which would all be asked for."""
    return 0 <= file["size"] <= MAX_FILE_BYTES and file["chunks"] == -(-file["size"] // CHUNK_BYTES)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        _log.warning("redis: %r", error)
        raise AdapterUnavailableError(f"The adapter store in Redis {said(error)}.") from None
    except OSError as error:
        _log.warning("redis store: %r", error)
        raise AdapterUnavailableError("The adapter's files cannot be copied from or to Redis at present.") from None
