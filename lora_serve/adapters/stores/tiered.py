"""A near store in front of a far one: read-through with verification, write-through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore, is_sound
from lora_serve.core.errors import AdapterUnavailableError


class TieredStore:
    """See AdapterStore. What is near and sound is served even while the far store is away."""

    def __init__(self, near: DiskStore, far: AdapterStore) -> None:
        self._near = near
        self._far = far

    def put(self, digest: str, folder: Path) -> None:
        """See AdapterStore. Done only when both have it."""
        self._near.put(digest, folder)
        self._far.put(digest, folder)

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """See AdapterStore. A near copy that is missing or broken is fetched again."""
        if not self._has_sound_copy(digest):
            self._fetch(digest)
        with self._near.open(digest) as folder:
            yield folder

    def has(self, digest: str) -> bool:
        """See AdapterStore."""
        return self._near.has(digest) or self._far.has(digest)

    def delete(self, digest: str) -> None:
        """See AdapterStore. Far first: if that fails, the near copy is still listed and can be deleted again."""
        self._far.delete(digest)
        self._near.delete(digest)

    def digests(self) -> frozenset[str]:
        """See AdapterStore."""
        return self._near.digests() | self._far.digests()

    def release(self, digest: str) -> None:
        """See AdapterStore."""
        self._near.delete(digest)

    def sweep(self, named: frozenset[str]) -> None:
        """See AdapterStore. The far store's other blobs may be named by others."""
        self._near.sweep(named)

    def replenish(self, digests: frozenset[str]) -> None:
        """Give the far store back what it has lost of these and is here: it was emptied, or dropped keys."""
        for digest in digests & self._near.digests():
            if not self._far.has(digest) and self._has_sound_copy(digest):
                with self._near.open(digest) as folder:
                    self._far.put(digest, folder)

    def _has_sound_copy(self, digest: str) -> bool:
        if not self._near.has(digest):
            return False
        with self._near.open(digest) as folder:
            return is_sound(folder, digest)

    def _fetch(self, digest: str) -> None:
        with self._far.open(digest) as folder:
            if not is_sound(folder, digest):
                raise AdapterUnavailableError(f"The far adapter store's copy of {digest} is corrupt.")
            self._near.put(digest, folder)
