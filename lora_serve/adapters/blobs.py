"""The folders that loaders read from: a store's blobs, held as long as somebody reads them. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from lora_serve.adapters.checkpoint.digest import adapter_digest
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.tiered import TieredStore, VerifiedBlob
from lora_serve.core.errors import InvalidAdapterError


class Blobs(Protocol):
    """Called on the loader's threads, several at once."""

    def verified(self, digest: str) -> AbstractContextManager[VerifiedBlob]:
        """Fetched from wherever it is, and what its digest says.

        Raises AdapterUnavailableError, InvalidAdapterError if it is corrupt, OSError.
        """

    def near(self, digest: str) -> AbstractContextManager[Path]:
        """The folder on this machine, its content not looked at. Raises AdapterUnavailableError if there is none."""

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """Put a file of ours into the folder on this machine, if there is room. Raises OSError."""


class StoredBlobs:
    """Those of a store in this process."""

    def __init__(self, store: AdapterStore, disk: DiskStore) -> None:
        """`disk`: the part of `store` on this machine, perhaps all of it."""
        self._store = store
        self.disk = disk

    @contextmanager
    def verified(self, digest: str) -> Iterator[VerifiedBlob]:
        """See Blobs."""
        if isinstance(self._store, TieredStore):
            with self._store.opened(digest) as blob:
                yield blob
            return
        start = time.perf_counter()
        with self._store.open(digest) as folder:
            opened = time.perf_counter()
            found = adapter_digest(folder)
            if found != digest:
                raise InvalidAdapterError([f"the stored files are corrupt: their digest is {found}, not {digest}"])
            yield VerifiedBlob(folder, "disk", opened - start, time.perf_counter() - opened)

    def near(self, digest: str) -> AbstractContextManager[Path]:
        """See Blobs."""
        return self.disk.open(digest)

    def keep_beside(self, digest: str, name: str, content: bytes | memoryview) -> None:
        """See Blobs."""
        self.disk.keep_beside(digest, name, content)
