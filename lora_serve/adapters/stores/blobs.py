"""The folders that loaders read from: a store's blobs, which stay in place while they are read. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from lora_serve.adapters.checkpoint.content import (
    AdapterContent,
    adapter_digest,
    check_digest,
    check_sizes,
    read_content,
)
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore, VerifiedBlob
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.figures import LoadTimes

V = TypeVar("V")


class Blobs(Protocol):
    """Called on the loader's threads, several at once."""

    def verified(self, digest: str) -> AbstractContextManager[VerifiedBlob]:
        """The blob from whichever tier has it, its content verified.

        Raises AdapterUnavailableError, also if it is corrupt: that is not the caller's fault; OSError.
        """

    def near(self, digest: str) -> AbstractContextManager[Path]:
        """The folder on this machine, its content not verified. Raises AdapterUnavailableError if there is none."""

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """Put another file into the blob's folder on this machine, if there is room. Raises OSError."""


class StoredBlobs:
    """The blobs of a store in this process. See Blobs."""

    def __init__(self, store: AdapterStore, disk: DiskStore) -> None:
        """`disk`: the part of `store` on this machine; may be `store` itself."""
        self._store = store
        self.disk = disk

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        if isinstance(self._store, TieredStore):
            with self._store.opened(digest) as blob:
                yield blob
            return
        start = time.perf_counter()
        with self._store.open(digest) as folder:
            opened = time.perf_counter()
            check_sizes(folder)
            check_digest(adapter_digest(folder), digest)
            yield VerifiedBlob(folder, "disk", opened - start, time.perf_counter() - opened)

    def near(self, digest: str) -> AbstractContextManager[Path]:
        return self.disk.open(digest)

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        self.disk.keep_beside(digest, name, content)


def fetch_timed(blobs: Blobs, digest: str, parse: Callable[[AdapterContent], V]) -> tuple[V, LoadTimes]:
    """The adapter of a blob as `parse` makes it of its content, checked against the digest; the time of each part.

    A blob on this machine is hashed while it is read. If it is missing or broken, the store verifies its copies and
    repairs what it can; that blob is hashed again, as files may change in between.
    Raises AdapterUnavailableError, OSError, what `parse` raises.
    """
    start = time.perf_counter()
    try:
        with blobs.near(digest) as folder:
            return _read(VerifiedBlob(folder, "disk", time.perf_counter() - start, 0.0), digest, parse)
    except (AdapterUnavailableError, OSError):  # the store finds out what is wrong
        pass
    with blobs.verified(digest) as blob:
        return _read(blob, digest, parse)


def _read(blob: VerifiedBlob, digest: str, parse: Callable[[AdapterContent], V]) -> tuple[V, LoadTimes]:
    start = time.perf_counter()
    content = read_content(blob.folder, digest)
    checked = time.perf_counter()
    value = parse(content)
    return value, LoadTimes(blob.tier, blob.fetch, blob.verify + checked - start, time.perf_counter() - checked)
