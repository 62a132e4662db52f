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

    def __init__(self, near: DiskStore, far: AdapterStore, far_tier: str = "redis") -> None:
        """`far_tier`: what the far store is called on cards."""
        self.near = near
        self._far = far
        self._far_tier = far_tier

    def put(self, digest: str, folder: Path) -> None:
        """See AdapterStore. Done only when both have it."""
        self.near.put(digest, folder)
        self._far.put(digest, folder)

    @contextmanager
    def open(self, digest: str) -> Iterator[Path]:
        """See AdapterStore. A near copy that is missing or broken is fetched again."""
        self.bring_near(digest)
        with self.near.open(digest) as folder:
            yield folder

    def bring_near(self, digest: str) -> str:
        """Make sure of a sound near copy; the tier that had it: "disk", or the far one's name. Raises as `open`."""
        if self._has_sound_copy(digest):
            return "disk"
        self._fetch(digest)
        return self._far_tier

    def has(self, digest: str) -> bool:
        """See AdapterStore."""
        return self.near.has(digest) or self._far.has(digest)

    def delete(self, digest: str) -> None:
        """See AdapterStore. Far first: if that fails, the near copy is still listed and can be deleted again."""
        self._far.delete(digest)
        self.near.delete(digest)

    def digests(self) -> frozenset[str]:
        """See AdapterStore."""
        return self.near.digests() | self._far.digests()

    def _has_sound_copy(self, digest: str) -> bool:
        if not self.near.has(digest):
            return False
        with self.near.open(digest) as folder:
            return is_sound(folder, digest)

    def _fetch(self, digest: str) -> None:
        with self._far.open(digest) as folder:
            if not is_sound(folder, digest):
                raise AdapterUnavailableError(f"The far adapter store's copy of {digest} is corrupt.")
            self.near.put(digest, folder)
